/* The gate's core under test, without torch: a fake of its seam, and the little that a test needs.
 *
 * Each test is a function TEST(name) and runs in a process of its own: `gate_tests NAME`. A failed CHECK prints where
 * and ends the process with 1; a test that hangs is ended by an alarm, after printing the events that it saw. */
#ifndef HARNESS_H
#define HARNESS_H

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "internal.h"

struct Fake {
    std::atomic<bool> armed{false};
    std::atomic<int> hold_error{0};
    std::atomic<int> holds_on{0}, holds_off{0};
    std::atomic<bool> tracing{false};
    std::atomic<bool> bounding{false};
    std::atomic<int64_t> operators{0}; /* that were let through, by all threads */
};
extern Fake fake;
extern thread_local bool fake_capture;

/* One operator of the calling thread. */
void fake_operator(const char *name = "aten::mm");

struct Test {
    const char *name;
    void (*run)();
};
std::vector<Test> &tests();
struct Register {
    Register(const char *name, void (*run)()) { tests().push_back({name, run}); }
};
#define TEST(name)                                  \
    static void name();                             \
    static Register register_##name(#name, name);   \
    static void name()

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) failed(__FILE__, __LINE__, #condition);                     \
    } while (0)
#define CHECK_EQ(seen, wanted)                                                        \
    do {                                                                              \
        const long long seen_ = (seen), wanted_ = (wanted);                           \
        if (seen_ != wanted_) failed_eq(__FILE__, __LINE__, #seen, seen_, wanted_);   \
    } while (0)
[[noreturn]] void failed(const char *file, int line, const char *what);
[[noreturn]] void failed_eq(const char *file, int line, const char *what, long long seen, long long wanted);

hs_signal line(int signo, int action, uint32_t causes, uint32_t flags = 0);
/* USR1/USR2, TSTP/CONT and TERM, as a rank has them. */
std::vector<hs_signal> usual_table();
int start(std::vector<hs_signal> &table, int event_fd = -1);
void start_usual();
hs_status status();
inline void pause_now(uint32_t cause = HS_CAUSE_API) { CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, cause), 0); }
inline void resume_now(uint32_t cause = HS_CAUSE_API) { CHECK_EQ(hs_gate_request(HS_ACTION_RESUME, cause), 0); }

/* fork(), and the child ends with this process, or after a minute. */
pid_t fork_child();
/* How it ended: its status, or minus the signal. */
int exit_of(pid_t child);
/* Runs it in another thread while this one sleeps: a main thread that polls is never quiet. */
inline void with_main_asleep(const std::function<void()> &body) { std::thread(body).join(); }
/* Spins (with a yield) until it is true; the alarm bounds it. */
void until(const std::function<bool()> &done);
/* Every event read so far; until_event() reads on until `kind` has been seen `n` times in all. */
std::vector<hs_event> &seen();
void read_events();
int count_of(int kind);
const hs_event &until_event(int kind, int n = 1);

/* A thread that issues operators until it is told to end. `name`: a comm, "" to keep the process's. */
class Trainer {
  public:
    explicit Trainer(const char *name);
    ~Trainer();
    std::atomic<int64_t> issued{0};

  private:
    std::atomic<bool> end_{false};
    std::thread thread_;
};
#endif
