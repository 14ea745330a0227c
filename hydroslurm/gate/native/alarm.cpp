/* What wakes the watcher, at once or soon: a signal that is sent to its thread alone, which blocks it and waits for it.
 *
 * A futex could wake it at once, but handlers need "soon" as well, and of all clocks that may be set in a handler only a timer
 * reaches one thread without a file descriptor, which the program might close or take for its own. A blocked signal is kept
 * until it is waited for, so that a wake is never lost, and nobody's handler of it ever runs. */
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif

namespace hs {
namespace {

/* Its default action is none: it does no harm to a thread that has the number of a watcher that has ended. And it is none that
 * anybody relies on: sigtimedwait also takes one that was sent to the process while all other threads blocked it, so SIGURG,
 * which Slurm may send as a warning, could be lost here. */
constexpr int kAlarm = SIGWINCH;
/* Beyond the next tick of most kernels, so that setting it programs no hardware: 1.6 us against 8 us on a virtual machine. */
constexpr int64_t kSoon_ns = 5 * kMs;

sigset_t alarm_set() noexcept {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, kAlarm);
    return set;
}

} // namespace

/* The system calls, for older C libraries have the functions in a library of their own. */
void alarm_begin() noexcept {
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = kAlarm;
    event.sigev_notify_thread_id = thread_id();
    int timer = kNoAlarm;
    if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer) != 0) timer = kNoAlarm; /* then "soon" is "at once" */
    gate.alarm.store(timer);
    gate.watcher.store(thread_id());
}

void alarm_wait(int64_t timeout_ns) noexcept {
    const sigset_t set = alarm_set();
    const timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    sigtimedwait(&set, nullptr, timeout_ns < 0 ? nullptr : &timeout);
}

/* Numbers of timers are not used again, so that a handler which still has this one does nothing. */
void alarm_end() noexcept {
    gate.watcher.store(0);
    const int timer = gate.alarm.exchange(kNoAlarm);
    if (timer != kNoAlarm) syscall(SYS_timer_delete, timer);
}

void watcher_wake() noexcept {
    const pid_t watcher = gate.watcher.load();
    if (watcher != 0) syscall(SYS_tgkill, getpid(), watcher, kAlarm);
}

void watcher_wake_soon() noexcept {
    const itimerspec soon = {{0, 0}, {0, kSoon_ns}};
    const int timer = gate.alarm.load();
    if (timer == kNoAlarm || syscall(SYS_timer_settime, timer, 0, &soon, nullptr) != 0) watcher_wake();
}

} // namespace hs
