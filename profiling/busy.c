/* The least that a signal needs to reach a busy thread: `busy FILE` computes for ever, and its handler of SIGUSR1 stores
 * CLOCK_MONOTONIC, nanoseconds, in the first eight bytes of FILE. Prints "ready". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *stamp_ns;

static void on_signal(int signo) {
    (void)signo;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *stamp_ns = now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    int file = open(argv[1], O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof *stamp_ns) != 0) return perror(argv[1]), 1;
    stamp_ns = mmap(NULL, sizeof *stamp_ns, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (stamp_ns == MAP_FAILED) return perror("mmap"), 1;
    *stamp_ns = 0; /* the page is there before the first signal */
    struct sigaction action = {.sa_handler = on_signal};
    if (sigaction(SIGUSR1, &action, NULL) != 0) return perror("sigaction"), 1;
    puts("ready");
    fflush(stdout);
    for (volatile double x = 1;;) x = x * 0.999 + 1;
}
