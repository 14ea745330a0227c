/* The watcher thread: latches -> open or closed gate -> PARKED.
 *
 * It blocks every signal, needs no GIL, and is the only thread that arms and disarms. */
#include <errno.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <map>

#include "internal.h"

namespace hs {
namespace {

/* After a move, do not notify the reader until a thread was held or ran again, or this much time has passed. The reader
 * is a Python thread: awake, it would compete for the GIL with the thread on its way to the gate (median time until
 * first held: 169 us with immediate notification, about 75 us so). */
constexpr int64_t kNotifyDelay_ns = 1 * kMs;
/* Let the timer of a closing's first wait expire with the kernel's tick. The thread on its way to the gate may wait for this
 * very core, and in a virtual machine a timer of its own takes 12 us to set; a held thread ends the wait anyway. */
constexpr unsigned long kArrivalSlack_ns = 4 * kMs;
constexpr int64_t kTickMin_ns = 1 * kMs;
constexpr int64_t kTickMax_ns = 10 * kMs;
constexpr int64_t kParkedTick_ns = 200 * kMs;
constexpr int64_t kLookMin_ns = 1 * kMs;
constexpr int64_t kLookMax_ns = 250 * kMs; /* older: we were stopped or starved in between; check again */
constexpr int64_t kTerminalBound_ns = 500 * kMs;

/* The first of two checks of a thread that is not held. */
struct Look {
    int64_t at_ns = 0;
    uint64_t ran = 0;
};

struct ParkCheck {
    bool parked = true;
    int held = 0;
    int quiet = 0;
    int64_t at_ns = 0; /* when the last thread came to rest */
    const Slot *last = nullptr; /* held last */
};

class Watcher {
  public:
    void run() noexcept;

  private:
    void collect() noexcept;
    void collect_latch(Latch &latch, uint64_t &seen, int action, int signo) noexcept;
    uint32_t causes_now() noexcept;
    bool wants_closed(uint32_t causes) const noexcept;
    int close_at_once() noexcept;
    void move(int closed) noexcept;
    int close(uint32_t causes) noexcept;
    void report_closed() noexcept;
    void report_refused(int error, uint32_t causes_before) noexcept;
    int64_t oldest_request_ns(uint32_t causes) const noexcept;
    void report_opened() noexcept;
    void update_window() noexcept;
    void close_window() noexcept;
    void let_through(int64_t n) noexcept;
    void unpark() noexcept;
    bool is_in_window() const noexcept { return closing_ != 0 && gate.window.closing.load() == closing_; }
    void mark_pausing() noexcept;
    void mark_resuming() noexcept;
    void end_mark(uint64_t &range) noexcept;
    void report_held() noexcept;
    void report_release() noexcept;
    void check_parked() noexcept;
    ParkCheck check_threads();
    void check_sleeper(pid_t tid, ParkCheck &check);
    void keep_callback() noexcept;
    void stop_for_terminal() noexcept;
    int64_t wait_timeout_ns() noexcept;
    bool is_notify_delayed() const noexcept { return notify_after_ns_ > mono_ns(); }
    void announce() noexcept {
        if (!is_notify_delayed()) events_announce();
    }

    bool is_closed() const noexcept { return gate.closed.load() != 0; }
    hs_event event_with(hs_event_kind kind, int64_t value_ns) const noexcept;

    hs_event collected_[kLines + 4];
    int n_collected_ = 0;
    uint64_t seen_lines_[kLines] = {};
    uint64_t seen_requests_[4] = {};
    uint32_t causes_ = 0;
    int64_t terminal_checked_ns_ = 0; /* the last Ctrl-Z checked */
    uint32_t held_for_ = 0;  /* every cause of this closing */
    bool closed_ = false;    /* closed, armed, and the opening not yet reported */
    bool stopping_ = false;
    bool refused_ = false;   /* torch refused the callback */
    bool first_reported_ = false;
    uint32_t closing_ = 0;   /* number of the last closing */
    uint32_t released_ = 0;  /* closing with the last reported release */
    int64_t asked_ns_ = 0;   /* stamp of the request that closed the gate */
    int64_t closed_ns_ = 0;
    int64_t moved_ns_ = 0;      /* when threads were last let go on; any rest is later */
    int64_t tick_ns_ = kTickMin_ns;
    int64_t notify_after_ns_ = 0;
    uint64_t pausing_ = HS_NO_RANGE;
    uint64_t resuming_ = HS_NO_RANGE;
    std::map<pid_t, Look> looks_;
};

hs_event Watcher::event_with(hs_event_kind kind, int64_t value_ns) const noexcept {
    hs_event event = event_of(kind);
    event.value_ns = value_ns;
    event.held = slots_held(gate.closed.load());
    event.quiet = gate.quiet.load();
    return event;
}

void Watcher::run() noexcept {
    closing_ = gate.last_closing.load();
    released_ = release.ready.load();
    for (;;) {
        const uint32_t seen_wakeup = gate.wakeup.load();
        const bool quit = gate.quit.load();
        const int closed = close_at_once();
        collect();
        if (!closed_) report_release();
        if (closed > 0) report_closed();
        move(closed);
        if (quit) break;
        update_window();
        if (is_closed()) report_held();
        announce(); /* before reading /proc, which takes longer than all of the above */
        if (is_closed() && !is_notify_delayed()) {
            if (gate.state.load() == HS_STATE_PARKING) check_parked();
            keep_callback();
        }
        stop_for_terminal();
        announce();
        const int64_t timeout_ns = wait_timeout_ns();
        const bool first_wait = closed_ && is_notify_delayed() && moved_ns_ == closed_ns_;
        prctl(PR_SET_TIMERSLACK, first_wait ? kArrivalSlack_ns : 0); /* 0: the default */
        futex_wait(gate.wakeup, seen_wakeup, timeout_ns);
    }
    while (closed_) { /* at the stop a handler was about to open: only the scheduler delays it */
        sched_yield();
        move(0);
    }
    report_release();
    end_mark(resuming_);
    events_announce();
}

int64_t Watcher::wait_timeout_ns() noexcept {
    if (is_notify_delayed()) return kNotifyDelay_ns;
    if (!closed_) return refused_ ? kParkedTick_ns : -1;
    if (gate.state.load() == HS_STATE_PARKED) return kParkedTick_ns;
    const int64_t tick = tick_ns_;
    tick_ns_ = std::min(kTickMax_ns, tick_ns_ + tick_ns_ / 2);
    return tick;
}

/* --- latches -> events and causes --------------------------------------------------------------------------- */

void Watcher::collect_latch(Latch &latch, uint64_t &seen, int action, int signo) noexcept {
    const uint64_t count = latch.count.load();
    if (count == seen) return;
    hs_event event = event_of(action == HS_ACTION_STOP ? HS_EVENT_STOP_REQUESTED : HS_EVENT_SIGNAL_RECEIVED);
    event.mono_ns = event.value_ns = latch.stamp_ns.load();
    event.signo = signo;
    event.sender_pid = latch.sender.load();
    event.count = static_cast<int64_t>(count - seen);
    event_text(event, action == HS_ACTION_PAUSE ? "pause" : action == HS_ACTION_RESUME ? "resume" : "stop");
    mark_request(action, signo, event.value_ns);
    collected_[n_collected_++] = event;
    seen = count;
}

void Watcher::collect() noexcept {
    n_collected_ = 0;
    for (int i = 0; i < signals.n; ++i) {
        Line &line = signals.lines[i];
        collect_latch(line.latch, seen_lines_[i], line.action, line.signo);
    }
    for (int action = HS_ACTION_PAUSE; action <= HS_ACTION_STOP; ++action)
        collect_latch(signals.requests[action], seen_requests_[action], action, 0);
    if (n_collected_ == 0) return;
    if (signals.stop.load() != 0) stopping_ = true;
    std::sort(collected_, collected_ + n_collected_, [](const hs_event &a, const hs_event &b) { return a.mono_ns < b.mono_ns; });
    const uint32_t causes = causes_now();
    for (int i = 0; i < n_collected_; ++i) {
        collected_[i].causes = causes;
        event_push(collected_[i]);
    }
}

uint32_t Watcher::causes_now() noexcept {
    constexpr int terminal_bit = 3;
    static_assert(HS_CAUSE_TERMINAL == 1 << terminal_bit, "bit of HS_CAUSE_TERMINAL");
    const int64_t ctrl_z_ns = signals.pause[terminal_bit].load();
    if (ctrl_z_ns > terminal_checked_ns_) {
        terminal_checked_ns_ = ctrl_z_ns;
        if (!terminal_may_stop_us()) {
            request_stamp_raise(signals.resume[terminal_bit], ctrl_z_ns);
            event_push(event_with(HS_EVENT_TERMINAL_STOP_IGNORED, ctrl_z_ns));
        }
    }
    uint32_t causes = 0;
    for (int bit = 0; bit < kCauses; ++bit)
        if (signals.pause[bit].load() > signals.resume[bit].load()) causes |= 1u << bit;
    return causes;
}

/* --- open and close ----------------------------------------------------------------------------------------- */

bool Watcher::wants_closed(uint32_t causes) const noexcept {
    const bool vacated = closed_ && (causes & HS_CAUSE_VACATED) != 0; /* keeps a gate closed; never closes it after a stop */
    return causes != 0 && (!stopping_ || vacated) && !gate.quit.load();
}

/* Close for a pause before its events are made: the training thread runs on until then. 1: closed; 0: nothing to do; -errno. */
int Watcher::close_at_once() noexcept {
    if (closed_ || signals.stop.load() != 0) return 0;
    const uint32_t causes = causes_now();
    if (!wants_closed(causes)) return 0;
    const int error = close(causes);
    return error < 0 ? error : 1;
}

/* `closed`: of close_at_once(). */
void Watcher::move(int closed) noexcept {
    const uint32_t before = causes_;
    causes_ = causes_now();
    gate.causes.store(causes_);
    held_for_ |= causes_;
    const bool want_closed = wants_closed(causes_);
    bool moved = closed > 0;
    if (closed_ && (!want_closed || gate.closed.load() == 0)) {
        gate_open(closing_);
        if (gate.closed.load() != 0) return; /* a handler is about to open, and then wakes us */
        report_opened();
        report_release();
        moved = true;
    }
    if (want_closed && !closed_) {
        if (const int error = closed < 0 ? closed : close(causes_); error < 0)
            report_refused(error, before);
        else
            report_closed();
        moved = true;
    }
    /* even if a request changed nothing: the caller waits for an answer */
    if (!moved && (causes_ != before || n_collected_ != 0)) event_push(event_with(HS_EVENT_CAUSES_CHANGED, 0));
    if (!want_closed) refused_ = false;
    if (stopping_ && !closed_) gate.state.store(HS_STATE_STOPPING);
}

/* 0; -errno if torch refuses the callback. */
int Watcher::close(uint32_t causes) noexcept {
    held_for_ = causes;
    gate.causes.store(causes);
    gate.passed.store(0);
    gate.capturing.store(0);
    gate.quiet.store(0);
    gate.window.closing.store(0);
    gate.window.allowance.store(0);
    gate.window.collectives.store(0);
    asked_ns_ = oldest_request_ns(causes);
    closing_ = gate.last_closing.fetch_add(1) + 1;
    gate.closes.fetch_add(1); /* before threads can be held: they report the pause's number */
    gate.closed.store(closing_); /* before arming: the first operator must find it closed */
    const int error = arm();
    closed_ns_ = mono_ns();
    if (error == 0) return 0;
    gate.closed.store(0);
    gate.closes.fetch_sub(1);
    generation_advance();
    return error;
}

void Watcher::report_closed() noexcept {
    refused_ = false;
    closed_ = true;
    moved_ns_ = closed_ns_;
    tick_ns_ = kTickMin_ns;
    notify_after_ns_ = closed_ns_ + kNotifyDelay_ns;
    first_reported_ = false;
    looks_.clear();
    mark_pausing();
    mark_moment(MOMENT_CLOSED, asked_ns_);
    gate.closed_mono_ns.store(closed_ns_);
    gate.state.store(HS_STATE_PARKING);
    hs_event event = event_with(HS_EVENT_GATE_CLOSED, asked_ns_);
    event.mono_ns = closed_ns_;
    event_push(event);
}

void Watcher::report_refused(int error, uint32_t causes_before) noexcept {
    if (!refused_ || causes_ != causes_before) {
        hs_event event = event_with(HS_EVENT_CAUSES_CHANGED, asked_ns_);
        event.count = -error;
        event_text(event, "torch refused the callback");
        event_push(event);
    }
    refused_ = true;
}

int64_t Watcher::oldest_request_ns(uint32_t causes) const noexcept {
    int64_t oldest_ns = INT64_MAX;
    for (int bit = 0; bit < kCauses; ++bit)
        if (causes >> bit & 1) oldest_ns = std::min(oldest_ns, signals.pause[bit].load());
    return oldest_ns;
}

/* Report an opening by any thread. Its cause is a stop, or the newest resume of a cause of the closing. */
void Watcher::report_opened() noexcept {
    disarm(); /* last: a thread in the callback already sees an open gate */
    closed_ = false;
    gate.closed_mono_ns.store(0);
    gate.state.store(HS_STATE_RUNNING);
    hs_event event = event_of(HS_EVENT_RESUMED);
    event.mono_ns = gate.opened_mono_ns.load();
    event.value_ns = signals.stop.load();
    for (int bit = 0; bit < kCauses; ++bit)
        if (held_for_ >> bit & 1) event.value_ns = std::max(event.value_ns, signals.resume[bit].load());
    if (event.value_ns == 0) event.value_ns = event.mono_ns; /* hs_gate_stop() */
    event.held = gate.let_go.load();
    event.passed = gate.passed.load();
    event.count = gate.window.collectives.load();
    event.causes = causes_;
    event_push(event);
    notify_after_ns_ = event.held > 0 ? event.mono_ns + kNotifyDelay_ns : 0;
    end_mark(pausing_);
    if (event.held > 0) mark_resuming();
    mark_moment(MOMENT_OPENED, event.value_ns);
}

/* --- collective windows --------------------------------------------------------------------------------------- */

/* Ignore stamps older than this closing: they were meant for another one, or for an open gate. */
void Watcher::update_window() noexcept {
    CollectiveWindow &window = gate.window;
    const bool here = closed_ && is_closed();
    const uint32_t calls = window.calls.load(); /* before `wanted` */
    if (window.ended.exchange(false) && here && is_in_window() && window.ended_ns.load() > asked_ns_) close_window();
    const int64_t n = window.wanted.exchange(0);
    if (n > 0 && here && window.wanted_ns.load() > asked_ns_) let_through(n);
    window.taken.store(calls); /* after the state has changed: see hs_gate_status() */
    if (here && gate.state.load() == HS_STATE_PARKED && window.steps.load() != window.parked_steps.load()) unpark();
}

void Watcher::close_window() noexcept {
    gate.window.closing.store(0);
    gate.window.allowance.store(0);
    event_push(event_with(HS_EVENT_LET_THROUGH, gate.window.ended_ns.load()));
}

void Watcher::let_through(int64_t n) noexcept {
    gate.window.allowance.fetch_add(n);
    gate.window.closing.store(closing_);
    unpark();
    hs_event event = event_with(HS_EVENT_LET_THROUGH, gate.window.wanted_ns.load());
    event.count = n;
    event_push(event);
    moved_ns_ = event.mono_ns;
    notify_after_ns_ = moved_ns_ + kNotifyDelay_ns;
    generation_advance();
}

/* Leave PARKED, even when a quiet thread moves in a window: threads that no longer rest must not be reported so. */
void Watcher::unpark() noexcept {
    gate.state.store(HS_STATE_PARKING);
    tick_ns_ = kTickMin_ns;
    mark_pausing();
}

/* Restore a lost callback: without it a closed gate holds no further thread. Through torch's interface only "no callback
 * at all" is visible; clearGlobalCallbacks(), the one call that removes ours, leaves exactly that. */
void Watcher::keep_callback() noexcept {
    if (!is_closed() || arming().any()) return;
    hs_event event = event_with(HS_EVENT_CALLBACK_LOST, 0);
    disarm();
    const int error = arm();
    event.count = error < 0 ? -error : 0;
    event_push(event);
}

/* --- held, parked, released --------------------------------------------------------------------------------- */

void Watcher::report_held() noexcept {
    const bool parked = gate.state.load() == HS_STATE_PARKED;
    for (bool first = !first_reported_;; first = false) {
        Slot *next = nullptr;
        for (Slot *slot = slots_first(); slot != nullptr; slot = slot->next) {
            const bool unreported = slot->held.load() == closing_ && slot->tid.load() != 0 && slot->reported != slot->visit.load();
            if (unreported && (next == nullptr || slot->since_ns.load() < next->since_ns.load())) next = slot;
        }
        if (next == nullptr) return;
        next->reported = next->visit.load();
        if (is_in_window()) notify_after_ns_ = 0; /* it has arrived */
        if (!first && !parked) continue;
        hs_event event = event_with(first && !parked ? HS_EVENT_FIRST_OPERATOR_HELD : HS_EVENT_LATE_OPERATOR_HELD, asked_ns_);
        event.mono_ns = std::max(next->since_ns.load(), closed_ns_); /* it may arrive before arm() returns */
        event.tid = next->tid.load();
        event.phase = next->phase.load();
        slot_text(*next, event.text);
        first_reported_ = true;
        notify_after_ns_ = 0;
        event_push(event);
    }
}

void Watcher::report_release() noexcept {
    const uint32_t closing = release.ready.load();
    if (closing == released_) return;
    released_ = closing;
    notify_after_ns_ = 0;
    hs_event event = event_of(HS_EVENT_FIRST_OPERATOR_RELEASED);
    event.mono_ns = release.mono_ns.load();
    event.tid = release.tid.load();
    event_push(event);
    end_mark(resuming_);
}

/* --- NVTX --------------------------------------------------------------------------------------------------- */

/* Also when threads are let go on: those not at rest are pausing. */
void Watcher::mark_pausing() noexcept {
    end_mark(resuming_);
    if (pausing_ == HS_NO_RANGE) pausing_ = hs_marks_begin(HS_RANGE_PAUSING, pause_number());
}

void Watcher::mark_resuming() noexcept {
    end_mark(resuming_);
    resuming_ = hs_marks_begin(HS_RANGE_RESUMING, pause_number());
}

void Watcher::end_mark(uint64_t &range) noexcept {
    hs_marks_end(range);
    range = HS_NO_RANGE;
}

void Watcher::check_parked() noexcept {
    ParkCheck check;
    const uint64_t steps = gate.window.steps.load();
    try {
        check = check_threads();
    } catch (...) { /* out of memory: retry at the next tick */
        return;
    }
    gate.quiet.store(check.quiet);
    if (!check.parked) return;
    report_held();
    gate.window.parked_steps.store(steps);
    gate.state.store(HS_STATE_PARKED);
    if (gate.window.steps.load() != steps) return unpark();
    hs_event event = event_with(HS_EVENT_PARKED, asked_ns_);
    event.mono_ns = std::max(check.at_ns, moved_ns_);
    end_mark(pausing_);
    mark_moment(MOMENT_AT_REST, event.mono_ns);
    event.held = check.held;
    event.count = gate.window.collectives.load();
    if (is_in_window() && check.last != nullptr) slot_text(*check.last, event.text);
    event_push(event);
}

ParkCheck Watcher::check_threads() {
    ParkCheck check;
    std::vector<pid_t> tids = autograd_threads();
    tids.push_back(getpid());
    for (Slot *slot = slots_first(); slot != nullptr; slot = slot->next) {
        const pid_t tid = slot->tid.load();
        if (tid == 0) continue;
        if (slot->held.load() == closing_) {
            ++check.held;
            if (slot->generation.load() != gate.generation.load()) check.parked = false; /* woken, and may go on */
            if (check.last == nullptr || slot->since_ns.load() > check.last->since_ns.load()) check.last = slot;
            check.at_ns = std::max(check.at_ns, slot->since_ns.load());
            tids.erase(std::remove(tids.begin(), tids.end(), tid), tids.end());
        } else if (slot->captured.load() == closing_) {
            check.parked = false; /* it captures, or did; held at its next operator after that */
        } else if (std::find(tids.begin(), tids.end(), tid) == tids.end()) {
            tids.push_back(tid);
        }
    }
    for (const pid_t tid : tids) check_sleeper(tid, check);
    return check;
}

void Watcher::check_sleeper(pid_t tid, ParkCheck &check) {
    const int64_t now = mono_ns(); /* before the look: this thread may lose its processor between the two */
    const Activity activity = thread_activity(tid);
    if (activity.state == Activity::GONE) return;
    Look &first = looks_[tid];
    const int64_t age = now - first.at_ns;
    if (activity.state != Activity::ASLEEP) {
        first = Look{};
        check.parked = false;
    } else if (first.at_ns == 0 || first.ran != activity.ran || age > kLookMax_ns) {
        first = Look{mono_ns(), activity.ran};
        check.parked = false;
    } else if (age < kLookMin_ns) {
        check.parked = false;
    } else {
        ++check.quiet;
        check.at_ns = std::max(check.at_ns, first.at_ns);
        first.at_ns = std::max(first.at_ns, now - kLookMax_ns);
    }
}

/* --- Ctrl-Z ------------------------------------------------------------------------------------------------- */

/* Stop the process: the shell waits for that, parked is not enough. The signal goes to this thread, so that the whole
 * process stops before the call returns; when it returns we were continued, whatever SIGCONT's handler does. */
void Watcher::stop_for_terminal() noexcept {
    if (!(causes_ & HS_CAUSE_TERMINAL)) return;
    const bool waited = gate.state.load() != HS_STATE_PARKING || mono_ns() - closed_ns_ >= kTerminalBound_ns;
    if (!waited) return;
    const int64_t ctrl_z_ns = signals.pause[3].load();
    if (signals.resume[3].load() >= ctrl_z_ns) return; /* already continued */
    event_push(event_with(HS_EVENT_TERMINAL_STOP, ctrl_z_ns));
    events_announce();
    /* Check again right before the stop: a SIGCONT between check and stop is lost, as in any program that stops itself.
     * A shell that watches a process further up may send it within a millisecond. */
    if (signals.resume[3].load() >= ctrl_z_ns) return;
    syscall(SYS_tgkill, getpid(), thread_id(), SIGSTOP);
    request_stamp_raise(signals.resume[3], ctrl_z_ns);
    watcher_wake(); /* check again at once */
}

/* Argument of sched_setattr(2); glibc has it from 2.41 on. */
struct SchedAttr {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
};

/* Ask for a short time slice. If all cores are busy, a woken thread waits 3 to 4 ms for the end of another's slice: that
 * was the 99th percentile of a pause. EEVDF (Linux 6.12 and later) lets a thread with a short one go first; older
 * kernels ignore it. It needs no privilege, and the watcher runs for microseconds per pause. */
void ask_for_short_slice() noexcept {
    SchedAttr attr = {};
    attr.size = sizeof attr;
    if (syscall(SYS_sched_getattr, 0, &attr, sizeof attr, 0) != 0 || attr.policy != 0) return; /* 0: SCHED_OTHER */
    attr.size = sizeof attr;
    attr.flags = 0;
    attr.runtime_ns = kMs / 10;
    syscall(SYS_sched_setattr, 0, &attr, 0);
}

} // namespace

void *watcher_main(void *) noexcept {
    pthread_setname_np(pthread_self(), "hs_gate");
    ask_for_short_slice();
    Watcher().run();
    return nullptr;
}

} // namespace hs
