// The dialect of mlx_tandem/model/kernels/dialect.py on a CPU: the threads of a block are fibres that take turns, so that
// shuffles and barriers do what they do on a GPU. Every fibre goes on to its next meeting point, then the next one does.
// Shared memory is filled with NaN before each block. A warp whose lanes do not meet ends the kernel with an error. What
// is asked for comes when it is waited for, or at once where warps run apart: either is allowed to a GPU.
// No header of the C++ library: each would take longer to compile than a kernel does.
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <ucontext.h>

extern "C" {
float expf(float);
float exp2f(float);
float log2f(float);
float tanhf(float);
float sqrtf(float);
float fabsf(float);
float ldexpf(float, int);
float nearbyintf(float);
}

typedef unsigned int uint;
struct alignas(16) uint4 { uint x, y, z, w; };
struct alignas(8) uint2 { uint x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
template <class X> static inline X min(X a, X b) { return b < a ? b : a; }
template <class X> static inline X max(X a, X b) { return a < b ? b : a; }

template <class To, class From> static inline To bits(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  memcpy(&y, &x, sizeof y);
  return y;
}

struct bfloat16 {
  uint16_t raw;
  bfloat16() : raw(0) {}
  explicit bfloat16(float x) {
    uint w = bits<uint>(x);
    raw = x == x ? (w + 0x7fff + ((w >> 16) & 1)) >> 16 : 0x7fff;
  }
  operator float() const { return bits<float>((uint)raw << 16); }
};

struct float16 {
  uint16_t raw;
  float16() : raw(0) {}
  explicit float16(float x) {
    uint w = bits<uint>(x), sign = (w >> 16) & 0x8000;
    float size = fabsf(x);
    if (!(x == x)) raw = 0x7fff;
    else if (size >= 65520.0f) raw = sign | 0x7c00;
    else if (size < 6.103515625e-05f) raw = sign | (uint)nearbyintf(size * 16777216.0f);
    else {
      w = (w & 0x7fffffff) - 0x38000000;  // the exponent's bias: 127 becomes 15
      raw = sign | ((w + 0xfff + ((w >> 13) & 1)) >> 13);
    }
  }
  operator float() const {
    uint exponent = (raw >> 10) & 31, rest = raw & 0x3ff;
    float size = exponent == 31 ? (rest ? __builtin_nanf("") : __builtin_inff())
        : exponent ? ldexpf(1024 + rest, (int)exponent - 25) : ldexpf(rest, -24);
    return raw & 0x8000 ? -size : size;
  }
};

namespace shim {

enum { MOST = 1024, STACK = 128 << 10, KEPT = 64 << 10, ARRAYS = 16, QUEUE = 256 };

// Of the threads of a block: all turn by turn, in either direction; or warp by warp, each up to the next barrier.
enum { TOGETHER, BACKWARDS, APART };

struct Fibre {
  jmp_buf at;
  bool started, done, at_barrier;  // started: in this launch
  int meeting;       // how often it has met the others of its warp
  int met_at;        // in which line of the source
  uint64_t gives[2];  // at this meeting and the one before
};

struct Array {
  const char* name;
  char* at;
};

struct Asked {
  void* to;
  const void* from;
  bool there;
  int group;
};

// What a thread has asked for and not waited for, the oldest first.
struct Queue {
  Asked each[QUEUE];
  int count, closed;  // groups
};

static Fibre fibres[MOST];
static char* stacks;
static char memory[KEPT] __attribute__((aligned(64)));
static char room[ROOM_BYTES + 1] __attribute__((aligned(64)));
static Queue queues[ROOM_BYTES ? MOST : 1];
static Array arrays[ARRAYS];
static int used, named;  // bytes of the memory, arrays in it
static jmp_buf scheduler;
static ucontext_t context;  // of this launch, with which fibres begin
static int current, arrived, generation, alive;
static int groups[3], group[3], threads, order;
static const char* failure;
static void (*entry)(void**);
static void** arguments;

static void fail(const char* why) {
  if (!failure) failure = why;
  _longjmp(scheduler, 1);
}

static void yield() {
  if (!_setjmp(fibres[current].at)) _longjmp(scheduler, 1);
}

static void barrier() {
  int mine = generation;
  if (alive < threads) fail("a thread waits at a barrier that others have passed by");
  if (++arrived == threads) {
    arrived = 0;
    generation++;
    return;
  }
  fibres[current].at_barrier = true;
  while (generation == mine) yield();
  fibres[current].at_barrier = false;
}

template <class X> static X exchange(X x, int lane, int line) {
  static_assert(sizeof(X) <= 8);
  Fibre& own = fibres[current];
  uint64_t word = 0;
  memcpy(&word, &x, sizeof x);
  int meeting = ++own.meeting;
  own.gives[meeting & 1] = word;
  own.met_at = line;
  yield();
  Fibre& other = fibres[(current & ~31) | lane];
  // The other has given by now, and may be one meeting further at most.
  bool meets = other.meeting == meeting + 1 || (other.meeting == meeting && other.met_at == line);
  if (!meets || (lane & ~31)) fail("the lanes of a warp did not meet in a shuffle");
  memcpy(&x, &other.gives[meeting & 1], sizeof x);
  return x;
}

static void* shared(const char* name, int bytes) {
  for (int i = 0; i < named; i++)
    if (!strcmp(arrays[i].name, name)) return arrays[i].at;
  if (named == ARRAYS || used + bytes > KEPT) fail("too much shared memory");
  arrays[named] = {name, memory + used};
  memset(memory + used, 0xff, bytes);
  used += (bytes + 63) & ~63;
  return arrays[named++].at;
}

// A fibre is a thread of one block after the other: to make one takes longer than most threads do.
static void start() {
  for (;;) {
    entry(arguments);
    fibres[current].done = true;
    alive--;
    if (arrived) fail("threads wait at a barrier that others have passed by");
    yield();
  }
}

// Lets a thread run to its next meeting point.
static void go(int thread) {
  Fibre& fibre = fibres[thread];
  current = thread;
  if (fibre.done || _setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.at, 1);
  fibre.started = true;
  context.uc_stack.ss_sp = stacks + (size_t)thread * STACK;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, start, 0);
  setcontext(&context);
}

// Lets the threads of a warp run until each waits at a barrier or is done.
static void go_on(int warp) {
  bool busy = true;
  while (busy && !failure) {
    busy = false;
    for (int t = warp; t < warp + 32 && t < threads && !failure; t++) {
      go(t);
      busy |= !fibres[t].done && !fibres[t].at_barrier;
    }
  }
}

static void block() {
  for (int i = 0; i < threads; i++) {
    Fibre& fibre = fibres[i];
    fibre.done = fibre.at_barrier = false;
    fibre.meeting = fibre.met_at = 0;
  }
  memset(room, 0xff, sizeof room);
  if (ROOM_BYTES)
    for (int i = 0; i < threads; i++) queues[i].count = queues[i].closed = 0;
  arrived = generation = used = named = 0;
  alive = threads;
  while (alive && !failure) {
    if (order == APART) {
      for (int warp = 0; warp < threads && !failure; warp += 32) go_on(warp);
    } else {
      for (int t = 0; t < threads && !failure; t++) go(order == BACKWARDS ? threads - 1 - t : t);
    }
  }
}

// Returns what went wrong, or null. `room_for_stacks`: MOST times STACK bytes.
static const char* launch(
    void (*kernel)(void**), void** args, const int* count, int size, int how, char* room_for_stacks) {
  entry = kernel, arguments = args, threads = size, order = how, failure = nullptr;
  memcpy(groups, count, sizeof groups);
  if (size > MOST) return "too many threads";
  stacks = room_for_stacks;
  for (int i = 0; i < size; i++) fibres[i].started = false;
  getcontext(&context);
  for (group[2] = 0; group[2] < groups[2]; group[2]++)
    for (group[1] = 0; group[1] < groups[1]; group[1]++)
      for (group[0] = 0; group[0] < groups[0] && !failure; group[0]++) block();
  return failure;
}

template <class V> static V load(const void* p) {
  if ((uintptr_t)p % sizeof(V)) fail("a load is not aligned");
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V> static void store(void* p, V v) {
  if ((uintptr_t)p % sizeof(V)) fail("a store is not aligned");
  memcpy(p, &v, sizeof v);
}

static void come(const Asked& one) { store(one.to, one.there ? load<uint4>(one.from) : uint4{0, 0, 0, 0}); }

static void ask(void* to, const void* from, bool there) {
  Queue& own = queues[current];
  if (own.count == QUEUE) fail("too much is asked for");
  if ((char*)to < room || (char*)to + 16 > room + ROOM_BYTES) fail("asked for outside of the room");
  own.each[own.count++] = {to, from, there, own.closed};
  if (order == APART) come(own.each[own.count - 1]);
}

static void wait(int groups) {
  Queue& own = queues[current];
  int came = 0;
  for (; came < own.count && own.each[came].group < own.closed - groups; came++) {
    if (order != APART) come(own.each[came]);
  }
  memmove(own.each, own.each + came, (own.count -= came) * sizeof(Asked));
}

static long long nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

}  // namespace shim

#define DEVICE static inline
#define GLOBAL
#define SHARED(type, name, n) type* const name = (type*)shim::shared(#name, sizeof(type) * (n))
#define SHARED_BYTES 49152
#define ROOM(type, name) type* const name = (type*)shim::room
#define ASYNC16(to, from, there) shim::ask(to, from, there)
#define ASYNC_CLOSE() shim::queues[shim::current].closed++
#define ASYNC_WAIT(n) shim::wait(n)
#define BARRIER() shim::barrier()
#define SHUFFLE_XOR(x, mask) shim::exchange(x, LANE ^ (mask), __LINE__)
#define SHUFFLE(x, lane) shim::exchange(x, lane, __LINE__)
#define LOAD16(p) shim::load<uint4>(p)
#define LOAD8(p) shim::load<uint2>(p)
#define AWAIT(p) (*(const volatile int*)(p) != 0)
#define AWAIT_FOR(p, s) AWAIT(p)
#define LOAD_SHARED(p) (*(const volatile int*)(p))
#define STORE_SHARED(p, x) *(volatile int*)(p) = x
#define NANOSECONDS() shim::nanoseconds()
#define STREAM16(p) LOAD16(p)
#define STORE16(p, v) shim::store<uint4>(p, v)
#define FLOAT_BITS(w) bits<float>((uint)(w))
#define WORD_BITS(x) bits<uint>((float)(x))
#define EXP2(x) exp2f(x)
#define LOG2(x) log2f(x)
#define TANH(x) tanhf(x)
#define RSQRT(x) (1.0f / sqrtf(x))
#define FLOAT4(a, b, c, d) float4{a, b, c, d}
#define WORDS4(a, b, c, d) uint4{a, b, c, d}
#define WORDS2(a, b) uint2{a, b}
#define BYTE(w, i) float(((w) >> (8 * (i))) & 255u)
#define UNROLL
#define ROLL
#define START                                                                                             \
  const int THREAD = shim::current, THREADS = shim::threads, LANE = THREAD & 31, WARP = THREAD >> 5;       \
  const int GROUP_X = shim::group[0], GROUP_Y = shim::group[1], GROUP_Z = shim::group[2];                  \
  const int GROUPS_X = shim::groups[0], GROUPS_Y = shim::groups[1], GROUPS_Z = shim::groups[2];            \
  (void)THREADS, (void)LANE, (void)WARP, (void)GROUP_X, (void)GROUP_Y, (void)GROUP_Z;                      \
  (void)GROUPS_X, (void)GROUPS_Y, (void)GROUPS_Z;

DEVICE float2 pair(uint w, bfloat16) { return {bits<float>(w << 16), bits<float>(w & 0xffff0000u)}; }
DEVICE float2 pair(uint w, float16) {
  float16 a, b;
  a.raw = w, b.raw = w >> 16;
  return {float(a), float(b)};
}
template <class T> DEVICE T EXP(T x) { return T(expf(x)); }
DEVICE float2 pair(uint w, float) { return {bits<float>(w), 0.0f}; }

template <class T> DEVICE uint packed(float a, float b, T) { return T(a).raw | (uint)T(b).raw << 16; }
template <class T> DEVICE void mma(float4& sum, uint4 a, uint2 b, T) {
  const int lane = shim::current & 31, g = lane / 4, t = lane % 4;
  const uint2 upper = {a.x, a.z}, lower = {a.y, a.w};  // rows g and g + 8: words of k = 2t and 2t + 8
  float* sums[4] = {&sum.x, &sum.y, &sum.z, &sum.w};
  for (int i = 0; i < 4; i++) {
    const uint2 rows[2] = {shim::exchange(upper, 4 * g + i, __LINE__), shim::exchange(lower, 4 * g + i, __LINE__)};
    for (int column = 0; column < 2; column++) {
      const uint2 k = shim::exchange(b, 4 * (2 * t + column) + i, __LINE__);
      for (int row = 0; row < 2; row++) {
        const float2 w = pair(rows[row].x, T()), v = pair(rows[row].y, T()), x = pair(k.x, T()), y = pair(k.y, T());
        *sums[2 * row + column] += w.x * x.x + w.y * x.y + v.x * y.x + v.y * y.y;
      }
    }
  }
}

// The instruction of ops/products/wgmma.py. Each thread computes its own sums, and reads the swizzled lines only when it
// waits for them: a line that is overwritten too early spoils the sums.
#define HAS_WGMMA
namespace shim {
struct Product {
  unsigned long long a, b;
};
static Product products[MOST][16];
static int asked_for[MOST], committed[MOST];
static bool fenced[MOST];
}  // namespace shim
DEVICE unsigned long long descriptor(const void* lines) { return (unsigned long long)lines >> 4; }
template <class T> DEVICE float number_of(unsigned long long lines, int line, int k) {
  const char* address = (const char*)(lines << 4);
  const size_t column = (size_t)address % 128 / 16 + k / 8;
  T x;
  memcpy(&x.raw, address - (size_t)address % 128 + line * 128 + (column ^ (line % 8)) * 16 + k % 8 * 2, 2);
  return float(x);
}
template <int N, class T> DEVICE void multiply(float (&)[N], unsigned long long a, unsigned long long b, T) {
  int& count = shim::asked_for[shim::current];
  if (!shim::fenced[shim::current]) shim::fail("a product lacks its fence");
  if (count == 16) shim::fail("too many products are asked for");
  shim::products[shim::current][count++] = {a, b};
}
DEVICE void fence_async_proxy() {}
DEVICE void wgmma_fence() { shim::fenced[shim::current] = true; }
DEVICE void wgmma_commit() { shim::committed[shim::current] = shim::asked_for[shim::current]; }
template <class T, int N> DEVICE void wgmma_wait(float (&d)[N], T) {
  const int thread = shim::current % 128, row = thread / 32 * 16 + thread % 32 / 4;
  for (int each = 0; each < shim::committed[shim::current]; each++) {
    const shim::Product one = shim::products[shim::current][each];
    for (int i = 0; i < N; i++) {
      const int m = row + i % 4 / 2 * 8, n = i / 4 * 8 + thread % 4 * 2 + i % 2;
      for (int k = 0; k < 16; k++) d[i] += number_of<T>(one.a, m, k) * number_of<T>(one.b, n, k);
    }
  }
  shim::asked_for[shim::current] = shim::committed[shim::current] = 0;
  shim::fenced[shim::current] = false;
}
