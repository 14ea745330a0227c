/* A file system that takes its time, for LD_PRELOAD: each call on a path below SLOW_BELOW, or on a
 * descriptor of such a file, sleeps SLOW_US microseconds first, as a round trip to a file server.
 * Threads wait side by side. Closing and lseek cost nothing, as on NFS after a read. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 1 << 16 };
static unsigned char slow_fds[MOST];
static const char *below;
static size_t below_length;
static struct timespec delay;

__attribute__((constructor)) static void start(void) {
    const char *us = getenv("SLOW_US");
    below = getenv("SLOW_BELOW");
    below_length = below ? strlen(below) : 0;
    long ns = (us ? atol(us) : 0) * 1000L;
    delay.tv_sec = ns / 1000000000L;
    delay.tv_nsec = ns % 1000000000L;
}

static int wait_path(const char *path) {
    int slow = below && path && strncmp(path, below, below_length) == 0;
    if (slow) nanosleep(&delay, NULL);
    return slow;
}

static void wait_fd(int fd) {
    if (fd >= 0 && fd < MOST && slow_fds[fd]) nanosleep(&delay, NULL);
}

static int note(int fd, int slow) {
    if (fd >= 0 && fd < MOST) slow_fds[fd] = (unsigned char)slow;
    return fd;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPENS(name)                                                                   \
    int name(const char *path, int flags, ...) {                                      \
        va_list more;                                                                 \
        va_start(more, flags);                                                        \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0;      \
        va_end(more);                                                                 \
        int slow = wait_path(path);                                                   \
        return note(REAL(name)(path, flags, mode), slow);                             \
    }
OPENS(open)
OPENS(open64)

#define STATS(name, type)                                    \
    int name(const char *path, struct type *found) {         \
        wait_path(path);                                     \
        return REAL(name)(path, found);                      \
    }
STATS(stat, stat)
STATS(lstat, stat)
STATS(stat64, stat64)
STATS(lstat64, stat64)

#define FSTATS(name, type)                                   \
    int name(int fd, struct type *found) {                   \
        wait_fd(fd);                                         \
        return REAL(name)(fd, found);                        \
    }
FSTATS(fstat, stat)
FSTATS(fstat64, stat64)

ssize_t read(int fd, void *buffer, size_t count) {
    wait_fd(fd);
    return REAL(read)(fd, buffer, count);
}

ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset) {
    wait_fd(fd);
    return REAL(pread64)(fd, buffer, count, offset);
}

int close(int fd) {
    note(fd, 0);
    return REAL(close)(fd);
}

DIR *opendir(const char *path) {
    wait_path(path); /* one for the folder, one for its entries */
    wait_path(path);
    return REAL(opendir)(path);
}
