/* A storage that fails for a while: LD_PRELOAD this, and calls on files below a folder fail now and then.

   FAILING_PATH    the folder; a file counts whose path begins so
   FAILING_WITH    EIO, ENOSPC, ESTALE, EINTR, or SHORT: half of what was asked for
   FAILING_CALLS   some of: open read write sync rename list stat
   FAILING_EVERY   each n-th of these calls fails (of this process)
   FAILING_SWITCH  a file: while it is there
   FAILING_COUNT   a file: a byte for each call that failed
   Calls inside the C library itself (fread, fopen) are not seen. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long count;

static int is_below(const char *path) {
    const char *folder = getenv("FAILING_PATH");
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static void count_it(void) {
    int file = syscall(SYS_openat, AT_FDCWD, getenv("FAILING_COUNT"), O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (file < 0) abort();
    if (syscall(SYS_write, file, ".", 1) != 1) abort();
    syscall(SYS_close, file);
}

/* Return the error of this call; 0: it works; -1: it comes short. */
static int fault(const char *call, const char *path) {
    const char *calls = getenv("FAILING_CALLS"), *with = getenv("FAILING_WITH"), *on = getenv("FAILING_SWITCH");
    if (!calls || !with || !on || !strstr(calls, call) || !is_below(path)) return 0;
    if (syscall(SYS_access, on, F_OK)) return 0;
    if (++count % atol(getenv("FAILING_EVERY"))) return 0;
    count_it();
    if (!strcmp(with, "SHORT")) return -1;
    return !strcmp(with, "ENOSPC") ? ENOSPC : !strcmp(with, "ESTALE") ? ESTALE : !strcmp(with, "EINTR") ? EINTR : EIO;
}

static int fault_of(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fault(call, path);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define BYTES(name, call, parameters, ...)                                   \
    ssize_t name parameters {                                                \
        REAL(name); int error = fault_of(call, fd);                          \
        if (error > 0) { errno = error; return -1; }                         \
        if (error < 0 && size > 1) size /= 2;                                \
        return real(fd, buffer, size, ##__VA_ARGS__); }

BYTES(read, "read", (int fd, void *buffer, size_t size))
BYTES(pread, "read", (int fd, void *buffer, size_t size, off_t at), at)
BYTES(pread64, "read", (int fd, void *buffer, size_t size, off64_t at), at)
BYTES(write, "write", (int fd, const void *buffer, size_t size))
BYTES(pwrite, "write", (int fd, const void *buffer, size_t size, off_t at), at)
BYTES(pwrite64, "write", (int fd, const void *buffer, size_t size, off64_t at), at)

/* Of several buffers a short call fills half of the first. */
#define BUFFERS(name, call, parameters, ...)                                 \
    ssize_t name parameters {                                                \
        REAL(name); int error = fault_of(call, fd);                          \
        if (error > 0) { errno = error; return -1; }                         \
        struct iovec half = pieces[0];                                       \
        if (error < 0 && half.iov_len > 1) { half.iov_len /= 2; pieces = &half; n = 1; } \
        return real(fd, pieces, n, ##__VA_ARGS__); }

BUFFERS(readv, "read", (int fd, const struct iovec *pieces, int n))
BUFFERS(writev, "write", (int fd, const struct iovec *pieces, int n))
BUFFERS(preadv, "read", (int fd, const struct iovec *pieces, int n, off_t at), at)
BUFFERS(preadv64, "read", (int fd, const struct iovec *pieces, int n, off64_t at), at)
BUFFERS(preadv2, "read", (int fd, const struct iovec *pieces, int n, off_t at, int flags), at, flags)
BUFFERS(preadv64v2, "read", (int fd, const struct iovec *pieces, int n, off64_t at, int flags), at, flags)

#define SYNC(name)                                                           \
    int name(int fd) {                                                       \
        REAL(name); int error = fault_of("sync", fd);                        \
        if (error > 0) { errno = error; return -1; }                         \
        return real(fd); }

SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
    REAL(rename); int error = fault("rename", to);
    if (error > 0) { errno = error; return -1; }
    return real(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
    REAL(renameat); int error = fault("rename", to);
    if (error > 0) { errno = error; return -1; }
    return real(a, from, b, to);
}

#define OPEN(name, parameters, ...)                                          \
    int name parameters {                                                    \
        REAL(name); int error = fault("open", path);                         \
        if (error > 0) { errno = error; return -1; }                         \
        va_list rest; va_start(rest, flags);                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                        \
        return real(__VA_ARGS__, flags, mode); }

OPEN(open, (const char *path, int flags, ...), path)
OPEN(open64, (const char *path, int flags, ...), path)
OPEN(openat, (int folder, const char *path, int flags, ...), folder, path)
OPEN(openat64, (int folder, const char *path, int flags, ...), folder, path)

DIR *opendir(const char *path) {
    REAL(opendir); int error = fault("list", path);
    if (error > 0) { errno = error; return NULL; }
    return real(path);
}

#define STAT(name, parameters, ...)                                          \
    int name parameters {                                                    \
        REAL(name); int error = fault("stat", path);                         \
        if (error > 0) { errno = error; return -1; }                         \
        return real(__VA_ARGS__); }

STAT(stat, (const char *path, struct stat *found), path, found)
STAT(stat64, (const char *path, struct stat64 *found), path, found)
STAT(lstat, (const char *path, struct stat *found), path, found)
STAT(lstat64, (const char *path, struct stat64 *found), path, found)
STAT(fstatat, (int folder, const char *path, struct stat *found, int flags), folder, path, found, flags)
STAT(fstatat64, (int folder, const char *path, struct stat64 *found, int flags), folder, path, found, flags)
