/* Takes the place of the C library's calls that open a connection to elsewhere. Each is refused and written down. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void record(const char *call, const char *target) {
    const char *path = getenv("TANDEM_TEST_OUTBOUND");
    int file = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (file >= 0) {
        dprintf(file, "%s %s\n", call, target);
        close(file);
    }
}

/* Ranks of one machine connect to each other. */
static int allowed(const char *name) {
    return getenv("TANDEM_TEST_LOOPBACK") && strcmp(name, "127.0.0.1") == 0;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
    char name[INET6_ADDRSTRLEN] = "?";
    if (address && address->sa_family == AF_INET) {
        inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, name, sizeof name);
    } else if (address && address->sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, name, sizeof name);
    }
    if (name[0] == '?' || allowed(name)) {
        int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
        return next(fd, address, length);
    }
    record("connect", name);
    errno = EACCES;
    return -1;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    if (node && !allowed(node)) {
        record("getaddrinfo", node);
        return EAI_FAIL;
    }
    int (*next)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        dlsym(RTLD_NEXT, "getaddrinfo");
    return next(node, service, hints, found);
}
