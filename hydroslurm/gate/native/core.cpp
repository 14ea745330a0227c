/* Start, stop, status, fork; clocks and futexes. */
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <iterator>

#include "internal.h"

namespace hs {

Gate gate;

namespace {

pthread_mutex_t lifecycle = PTHREAD_MUTEX_INITIALIZER;
pthread_t watcher;

int64_t clock_ns(clockid_t clock) noexcept {
    timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::atomic<uint32_t> registered{0}; /* callbacks, by bit */
std::atomic<uint32_t> inherited{0};

/* The child has one thread, which is at a fork, not at an operator. Its gate is open, it has no watcher, and `signals.owner`
 * tells the inherited handlers that nothing is meant for it. */
void gate_after_fork() noexcept {
    gate.owner.store(0);
    signals_after_fork();
    gate.closed.store(0);
    gate.state.store(HS_STATE_RUNNING);
    gate.causes.store(0);
    gate.closed_mono_ns.store(0);
    gate.quiet.store(0);
    gate.armed.store(false);
    gate.quit.store(false);
    hold_after_fork();
}

void callbacks_after_fork() noexcept { inherited.fetch_or(registered.exchange(0)); }

/* In the order in which the locks are taken: no fork between our word and torch's. */
constexpr struct {
    pthread_mutex_t *mutex;
    void (*after_fork)() noexcept;
} kParts[] = {
    {&lifecycle, gate_after_fork},     {&gate.arming, callbacks_after_fork}, {&trace_mutex, trace_after_fork},
    {&ahead_mutex, ahead_after_fork},  {&marks_mutex, marks_after_fork},     {&events_mutex, events_after_fork},
};

void before_fork() {
    for (const auto &part : kParts) pthread_mutex_lock(part.mutex);
}

void after_fork_in_parent() {
    for (auto part = std::rbegin(kParts); part != std::rend(kParts); ++part) pthread_mutex_unlock(part->mutex);
}

void after_fork_in_child() {
    for (const auto &part : kParts) {
        part.after_fork();
        pthread_mutex_init(part.mutex, nullptr);
    }
}

int watch_forks() noexcept {
    static int result = -1;
    if (result != 0) result = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return -result;
}

/* The new thread inherits the signal mask of its creator. */
int watcher_start() noexcept {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&watcher, nullptr, watcher_main, nullptr);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return -error;
}

void watcher_end() noexcept {
    gate.quit.store(true);
    watcher_wake();
    pthread_join(watcher, nullptr);
    gate.quit.store(false);
    gate.state.store(HS_STATE_RUNNING);
    gate.causes.store(0);
    events_use_fd(-1);
}

int start(hs_signal *table, int n, int event_fd) noexcept {
    if (gate.owner.load() == getpid()) return -EALREADY;
    if (const int error = signals_check(table, n); error < 0) return error;
    if (const int error = watch_forks(); error < 0) return error;
    if (signals.owner.exchange(0) == kForkedChild) signals_restore(); /* or our handler would chain to itself */
    signals_clear_latches();
    window_clear();
    gate.closes.store(0);
    if (const int error = signals_prepare(table, n); error < 0) return error;
    hold_find_python();
    events_use_fd(event_fd);
    if (const int error = watcher_start(); error < 0) {
        events_use_fd(-1);
        return error;
    }
    gate.owner.store(getpid());
    signals.owner.store(getpid()); /* before the handlers, which read it */
    const int error = signals_install(table, n);
    if (error < 0) {
        signals.owner.store(0);
        gate.owner.store(0);
        watcher_end();
    }
    return error;
}

} // namespace

int forks_watch() noexcept {
    const Locked locked(lifecycle);
    return watch_forks();
}

/* Counted before it is registered and until it is removed: a callback that a child looks for in vain costs nothing. */
int callback_on(Callback which) noexcept {
    callback_drop_inherited(which);
    registered.fetch_or(1u << which);
    const int error = arming().on(which);
    if (error < 0) registered.fetch_and(~(1u << which));
    return error;
}

void callback_off(Callback which) noexcept {
    inherited.fetch_and(~(1u << which));
    arming().off(which);
    registered.fetch_and(~(1u << which));
}

void callback_drop_inherited(Callback which) noexcept {
    const uint32_t bit = 1u << which;
    if (inherited.load(std::memory_order_relaxed) & bit && inherited.fetch_and(~bit) & bit) arming().off(which);
}

int64_t mono_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }
int64_t epoch_ns() noexcept { return clock_ns(CLOCK_REALTIME); }
pid_t thread_id() noexcept { return static_cast<pid_t>(syscall(SYS_gettid)); }

void futex_wait(Word &word, uint32_t seen, int64_t timeout_ns) noexcept {
    timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, timeout_ns < 0 ? nullptr : &timeout, nullptr, 0);
}

void futex_wake(Word &word, int n) noexcept { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, n, nullptr, nullptr, 0); }

bool gate_open(uint32_t closing) noexcept {
    uint32_t last = gate.opening.load();
    if (last >= closing || !gate.opening.compare_exchange_strong(last, closing)) return false;
    gate.let_go.store(slots_held(closing));
    gate.opened_mono_ns.store(mono_ns());
    gate.closed.store(0);
    generation_advance();
    return true;
}

int arm() noexcept {
    const Locked locked(gate.arming);
    const int error = callback_on(HOLD);
    gate.armed.store(error == 0);
    return error;
}

void disarm() noexcept {
    const Locked locked(gate.arming);
    callback_off(HOLD);
    gate.armed.store(false);
}

} // namespace hs

using namespace hs;

int hs_gate_abi(void) { return HS_GATE_ABI; }

int hs_gate_start(hs_signal *table, int n, int event_fd) {
    const Locked locked(lifecycle);
    return start(table, n, event_fd);
}

int hs_gate_stop(void) {
    const Locked locked(lifecycle);
    int replaced = 0;
    if (gate.owner.load() == getpid()) {
        if (signals.owner.load() == getpid()) {
            replaced = signals_restore();
            signals.owner.store(0);
        }
        gate.owner.store(0);
        watcher_end();
    }
    return replaced;
}

int hs_gate_claim(int action, int on) {
    if (action < HS_ACTION_PAUSE || action > HS_ACTION_STOP) return -EINVAL;
    const Locked locked(lifecycle);
    return signals.owner.load() == getpid() ? signals_claim(action, on != 0) : -ESRCH;
}

int hs_gate_check_handlers(void) {
    const Locked locked(lifecycle);
    if (signals.owner.load() != getpid()) return 0;
    const int replaced = signals_replaced();
    signals_help_late();
    return replaced;
}

int hs_gate_retake(int signo, int chain) {
    const Locked locked(lifecycle);
    return signals.owner.load() == getpid() ? signals_retake(signo, chain != 0) : -ESRCH;
}

int hs_gate_status(hs_status *out) {
    if (out == nullptr) return -EINVAL;
    *out = {};
    out->state = gate.state.load();
    if (out->state == HS_STATE_PARKED && window_has_moved()) out->state = HS_STATE_PARKING; /* as the watcher is about to */
    out->causes = gate.causes.load();
    out->held = slots_held(gate.closed.load());
    out->quiet = gate.quiet.load();
    out->armed = gate.armed.load();
    out->capturing = gate.capturing.load();
    out->passed = gate.passed.load();
    out->closes = gate.closes.load();
    out->closed_mono_ns = gate.closed_mono_ns.load();
    const uint32_t closing = gate.closed.load();
    out->window_open = closing != 0 && gate.window.closing.load() == closing;
    out->allowance = out->window_open ? gate.window.allowance.load() : 0;
    out->let_through = out->window_open ? gate.window.collectives.load() : 0;
    return 0;
}
