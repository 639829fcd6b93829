/* A storage that fails for a while: LD_PRELOAD this, and calls on files below a folder fail now and then.

   FAILING_PATH    folders, with a colon between two; a file counts whose path begins as one
   FAILING_WITH    EIO, ENOSPC, ESTALE, EROFS, EINTR, or SHORT: half of what was asked for, to read or to write
   FAILING_CALLS   some of: open read write sync close rename mkdir unlink list stat
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
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static const struct { const char *name; int number; } errors[] = {
    {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"ESTALE", ESTALE}, {"EROFS", EROFS}, {"EINTR", EINTR}, {"SHORT", -1}};

static atomic_long count;

static int is_below(const char *path) {
    const char *folder = getenv("FAILING_PATH");
    for (; folder && path && *folder; folder += strcspn(folder, ":"), folder += *folder == ':')
        if (!strncmp(path, folder, strcspn(folder, ":"))) return 1;
    return 0;
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
    if (!strcmp(with, "SHORT") && strcmp(call, "read") && strcmp(call, "write")) return 0;
    if (syscall(SYS_access, on, F_OK)) return 0;
    if (++count % atol(getenv("FAILING_EVERY"))) return 0;
    count_it();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(with, errors[i].name)) return errors[i].number;
    abort();
}

static int path_of(int fd, char *path, size_t room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlink, link, path, room - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return 1;
}

static int fault_of(const char *call, int fd) {
    char path[PATH_MAX];
    return path_of(fd, path, sizeof path) ? fault(call, path) : 0;
}

/* Of a path that may be relative to an open folder. */
static int fault_at(const char *call, int folder, const char *path) {
    char whole[2 * PATH_MAX];
    if (!path || *path == '/' || folder == AT_FDCWD) return fault(call, path);
    if (!path_of(folder, whole, PATH_MAX)) return 0;
    size_t length = strlen(whole);
    snprintf(whole + length, sizeof whole - length, "/%s", path);
    return fault(call, whole);
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

#define FILES(name, call, parameters, ...)                                   \
    int name parameters {                                                    \
        REAL(name); int error = fault_of(call, fd);                          \
        if (error > 0) { errno = error; return -1; }                         \
        return real(__VA_ARGS__); }

FILES(fsync, "sync", (int fd), fd)
FILES(fdatasync, "sync", (int fd), fd)
FILES(fstat, "stat", (int fd, struct stat *found), fd, found)
FILES(fstat64, "stat", (int fd, struct stat64 *found), fd, found)

/* A file is closed, whatever close() says. */
int close(int fd) {
    REAL(close); int error = fault_of("close", fd), result = real(fd);
    if (error > 0) { errno = error; return -1; }
    return result;
}

ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    REAL(sendfile); int error = fault_of("read", from);
    if (!error) error = fault_of("write", to);
    if (error > 0) { errno = error; return -1; }
    if (error < 0 && size > 1) size /= 2;
    return real(to, from, at, size);
}

#define NAMES(name, call, folder, path, parameters, ...)                     \
    int name parameters {                                                    \
        REAL(name); int error = fault_at(call, folder, path);                \
        if (error > 0) { errno = error; return -1; }                         \
        return real(__VA_ARGS__); }

NAMES(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), from, to)
NAMES(renameat, "rename", b, to, (int a, const char *from, int b, const char *to), a, from, b, to)
NAMES(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t mode), path, mode)
NAMES(mkdirat, "mkdir", at, path, (int at, const char *path, mode_t mode), at, path, mode)
NAMES(unlink, "unlink", AT_FDCWD, path, (const char *path), path)
NAMES(rmdir, "unlink", AT_FDCWD, path, (const char *path), path)
NAMES(unlinkat, "unlink", at, path, (int at, const char *path, int flags), at, path, flags)
NAMES(stat, "stat", AT_FDCWD, path, (const char *path, struct stat *found), path, found)
NAMES(stat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *found), path, found)
NAMES(lstat, "stat", AT_FDCWD, path, (const char *path, struct stat *found), path, found)
NAMES(lstat64, "stat", AT_FDCWD, path, (const char *path, struct stat64 *found), path, found)
NAMES(fstatat, "stat", at, path, (int at, const char *path, struct stat *found, int flags), at, path, found, flags)
NAMES(fstatat64, "stat", at, path, (int at, const char *path, struct stat64 *found, int flags), at, path, found, flags)

#define OPEN(name, folder, parameters, ...)                                  \
    int name parameters {                                                    \
        REAL(name); int error = fault_at("open", folder, path);              \
        if (error > 0) { errno = error; return -1; }                         \
        va_list rest; va_start(rest, flags);                                 \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                        \
        return real(__VA_ARGS__, flags, mode); }

OPEN(open, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), path)
OPEN(openat, at, (int at, const char *path, int flags, ...), at, path)
OPEN(openat64, at, (int at, const char *path, int flags, ...), at, path)

DIR *opendir(const char *path) {
    REAL(opendir); int error = fault("list", path);
    if (error > 0) { errno = error; return NULL; }
    return real(path);
}
