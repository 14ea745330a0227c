/* Handlers of others, forked children, what a pause must not break. */
#include <fstream>
#include <iterator>

#include "harness.h"

static std::atomic<int> plain_calls{0}, info_calls{0};
static void plain_handler(int) { ++plain_calls; }
static void info_handler(int, siginfo_t *info, void *) { info_calls += info != nullptr ? 1 : 100; }

static struct sigaction installed(int signo) {
    struct sigaction now;
    CHECK_EQ(sigaction(signo, nullptr, &now), 0);
    return now;
}

static void install(int signo, void (*handler)(int), int flags = 0) {
    struct sigaction action = {};
    action.sa_handler = handler;
    action.sa_flags = flags;
    CHECK_EQ(sigaction(signo, &action, nullptr), 0);
}

static void install_info(int signo, void (*handler)(int, siginfo_t *, void *), int flags = 0) {
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    CHECK_EQ(sigaction(signo, &action, nullptr), 0);
}

/* Handlers that were there before are called, of both kinds, and put back as they were. */
TEST(handlers_are_chained_and_restored) {
    install(SIGUSR1, plain_handler);
    install_info(SIGUSR2, info_handler, SA_RESTART);
    start_usual();
    CHECK(!(installed(SIGUSR1).sa_flags & SA_RESTART));
    CHECK(installed(SIGUSR2).sa_flags & SA_RESTART);
    for (int i = 0; i < 5; ++i) {
        raise(SIGUSR1);
        raise(SIGUSR2);
    }
    CHECK_EQ(plain_calls.load(), 5);
    CHECK_EQ(info_calls.load(), 5);
    CHECK_EQ(hs_gate_stop(), 0);
    CHECK(installed(SIGUSR1).sa_handler == plain_handler);
    CHECK(installed(SIGUSR2).sa_sigaction == info_handler);
    CHECK((installed(SIGUSR2).sa_flags & (SA_SIGINFO | SA_RESTART)) == (SA_SIGINFO | SA_RESTART));
    CHECK(installed(SIGTERM).sa_handler == SIG_DFL);
}

/* A handler leaves errno as it was. */
TEST(errno_is_kept) {
    install(SIGUSR1, [](int) { errno = ENOENT; });
    start_usual();
    for (const int signo : {SIGUSR1, SIGUSR2}) {
        errno = 77;
        raise(signo);
        CHECK_EQ(errno, 77);
    }
    hs_gate_stop();
}

/* Waits until the thread sleeps in a system call, so that a signal meets it there. */
[[maybe_unused]] static void until_asleep(pid_t tid) {
    until([tid] { return hs::thread_activity(tid).state == hs::Activity::ASLEEP; });
}

[[maybe_unused]] static int read_through_signal() {
    int ends[2];
    CHECK_EQ(pipe(ends), 0);
    const pthread_t reader = pthread_self();
    const pid_t tid = hs::thread_id();
    std::thread sender([&] {
        until_asleep(tid);
        pthread_kill(reader, SIGUSR1);
        until_event(HS_EVENT_SIGNAL_RECEIVED);
        until_asleep(tid);
        CHECK_EQ(write(ends[1], "x", 1), 1);
    });
    char byte;
    const ssize_t n = read(ends[0], &byte, 1);
    const int result = n == 1 ? 0 : errno;
    sender.join();
    close(ends[0]);
    close(ends[1]);
    return result;
}

#ifndef __SANITIZE_THREAD__ /* which delivers signals late, at a moment of its own choice */
/* A pause does not interrupt the program's system calls. */
TEST(calls_are_restarted) {
    start_usual();
    CHECK_EQ(read_through_signal(), 0);
    hs_gate_stop();
}

/* Where a handler is chained that interrupted calls before, it still does (Python's own are such). */
TEST(chained_handler_still_interrupts) {
    install(SIGUSR1, plain_handler);
    start_usual();
    CHECK_EQ(read_through_signal(), EINTR);
    hs_gate_stop();
}

#endif

/* The watcher takes no signal of the process. */
TEST(watcher_blocks_signals) {
    start_usual();
    pid_t watcher = 0;
    until([&] {
        for (pid_t tid = getpid(); tid < getpid() + 1000 && watcher == 0; ++tid) {
            char comm[16];
            hs::thread_name(tid, comm);
            if (strcmp(comm, "hs_gate") == 0) watcher = tid;
        }
        return watcher != 0;
    });
    std::ifstream file("/proc/self/task/" + std::to_string(watcher) + "/status");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const unsigned long long mask = strtoull(text.c_str() + text.find("SigBlk:") + 7, nullptr, 16);
    for (const int signo : {SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT, SIGTERM, SIGINT}) CHECK(mask >> (signo - 1) & 1);
    hs_gate_stop();
}

#ifndef __SANITIZE_THREAD__ /* which may put a signal off for ever in a child that waits for it */
/* A signal that stops the rank, or ends its pause as Ctrl-C does, does in a child what it did before we came. */
TEST(stop_signal_in_a_child) {
    std::vector<hs_signal> table = {line(SIGINT, HS_ACTION_RESUME, HS_CAUSE_API, HS_SIGNAL_ONLY_IF_HANDLED), line(SIGTERM, HS_ACTION_STOP, 0)};
    install(SIGINT, [](int) { _exit(43); });
    for (const bool handled : {false, true}) {
        if (handled) install(SIGTERM, [](int) { _exit(42); });
        CHECK_EQ(start(table), 0);
        for (const int signo : {SIGTERM, SIGINT}) {
            const pid_t child = fork_child();
            if (child == 0)
                for (;;) pause();
            CHECK_EQ(kill(child, signo), 0);
            CHECK_EQ(exit_of(child), signo == SIGINT ? 43 : handled ? 42 : -SIGTERM);
        }
        CHECK_EQ(status().state, HS_STATE_RUNNING);
        hs_gate_stop();
    }
}

/* Once stops are claimed, one that a child gets from anybody but its parent is meant for the rank. */
TEST(claimed_stop_in_a_child) {
    start_usual();
    CHECK(hs_gate_claim(HS_ACTION_STOP, 1) > 0);
    int survived[2];
    CHECK_EQ(pipe(survived), 0);
    sigset_t none, stop, before;
    sigemptyset(&none);
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &stop, &before);
    const pid_t child = fork_child();
    if (child == 0)
        for (;;) {
            sigsuspend(&none); /* nowhere else: one that comes before would be gone */
            CHECK_EQ(write(survived[1], "s", 1), 1);
        }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    const pid_t stranger = fork_child();
    if (stranger == 0) _exit(kill(child, SIGTERM));
    CHECK_EQ(exit_of(stranger), 0);
    close(survived[1]);
    char byte = 0;
    CHECK_EQ(read(survived[0], &byte, 1), 1);
    CHECK_EQ(kill(child, SIGTERM), 0);
    CHECK_EQ(exit_of(child), -SIGTERM);
    hs_gate_stop();
}
#endif

