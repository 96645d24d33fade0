// What kernels use of Metal's standard library, declared for clang's C++ for OpenCL: the languages share their address
// spaces, vector types and restrictions. Only types are checked; nothing of this is ever run. A pointer that names no
// address space is generic here, and does not exist in Metal: compiler.py looks for those.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long size_t;
typedef unsigned long uint64_t;
typedef long int64_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef __bf16 bfloat16_t;

#define VECTOR(type, n) typedef __attribute__((ext_vector_type(n))) type type##n;
#define VECTORS(type) VECTOR(type, 2) VECTOR(type, 3) VECTOR(type, 4)
VECTORS(float) VECTORS(half) VECTORS(int) VECTORS(uint) VECTORS(uchar) VECTORS(ushort)

// Metal makes vectors by a call, C++ for OpenCL by a cast.
#define MAKE(type, from)                                                                                         \
  inline type##2 make_##type##2(from a, from b) { return (type##2)((type)a, (type)b); }                          \
  inline type##4 make_##type##4(from a, from b, from c, from d) {                                                \
    return (type##4)((type)a, (type)b, (type)c, (type)d);                                                        \
  }
MAKE(float, float)
MAKE(uint, uint)
inline float2 make_float2(half2 x) { return (float2)((float)x.x, (float)x.y); }
inline float4 make_float4(float x) { return (float4)(x, x, x, x); }
#define float2(...) make_float2(__VA_ARGS__)
#define float4(...) make_float4(__VA_ARGS__)
#define uint2(...) make_uint2(__VA_ARGS__)
#define uint4(...) make_uint4(__VA_ARGS__)

template <typename To, typename From> inline To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  return __builtin_bit_cast(To, x);
}

// For each type apart, as Metal has them: a call with arguments of two types is ambiguous there, too.
#define ORDERED(type) type min(type, type); type max(type, type);
ORDERED(float) ORDERED(half) ORDERED(int) ORDERED(uint) ORDERED(short) ORDERED(ushort) ORDERED(long) ORDERED(size_t)
int abs(int);
float fabs(float);
float exp2(float);
float floor(float);
float rint(float);
float fma(float, float, float);
float sqrt(float);
namespace fast { float exp2(float); float tanh(float); float rsqrt(float); }
namespace precise { float exp2(float); float log2(float); float tanh(float); float rsqrt(float); }

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define SIMD(type)                                                                                               \
  type simd_shuffle(type, ushort);                                                                               \
  type simd_shuffle_xor(type, ushort);                                                                           \
  type simd_shuffle_down(type, ushort);                                                                          \
  type simd_sum(type);                                                                                           \
  type simd_max(type);
SIMD(float) SIMD(half) SIMD(int) SIMD(uint) SIMD(short) SIMD(ushort)
