/* Handlers and requests: stamp, latch, open, wake the watcher, chain. on_signal() and what it calls is async-signal-safe. */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "internal.h"

namespace hs {

Signals signals;

namespace {

std::atomic<int64_t> last_stamp_ns{0};
std::atomic<uint8_t> line_of[NSIG]; /* signal -> index of its line + 1 */

/* A pause that arrives right now is not lost: the watcher closes again. */
bool is_in_force(int bit) noexcept { return signals.pause[bit].load() > signals.resume[bit].load(); }

bool may_open() noexcept {
    constexpr int vacated_bit = 5;
    static_assert(HS_CAUSE_VACATED == 1 << vacated_bit, "bit of HS_CAUSE_VACATED");
    /* a stop wins over every cause but this, which keeps a closed gate closed and never closes an open one */
    if (signals.stop.load() != 0) return !is_in_force(vacated_bit) || gate.closed.load() == 0;
    for (int bit = 0; bit < kCauses; ++bit)
        if (is_in_force(bit)) return false;
    return true;
}

/* Only latch a pause: closing the gate registers a callback, for which torch locks a mutex and allocates, so the watcher
 * does it. */
void latch(Latch &latch, int action, uint32_t causes, int32_t sender) noexcept {
    const int64_t stamp_ns = unique_stamp_ns();
    latch.stamp_ns.store(stamp_ns);
    latch.sender.store(sender);
    if (action == HS_ACTION_STOP) {
        request_stamp_raise(signals.stop, stamp_ns);
    } else {
        RequestStamp *stamps = action == HS_ACTION_PAUSE ? signals.pause : signals.resume;
        for (int bit = 0; bit < kCauses; ++bit)
            if (causes >> bit & 1) request_stamp_raise(stamps[bit], stamp_ns);
    }
    latch.count.fetch_add(1); /* last: when it changes, the watcher reads the rest */
    const bool opened = action != HS_ACTION_PAUSE && may_open() && gate_open(gate.closed.load());
    /* A released thread wakes the watcher itself. Waking it here would cost that thread some 20 us if the two share a
     * core; the watcher of a closed gate checks every 200 ms in any case. */
    if (!opened || gate.let_go.load() == 0) watcher_wake();
    /* A watcher that wakes on this thread's core does not always run first, even with a short slice: with less than
     * 0.1 ms of our own slice left it waits for the next tick. 2 % of all pauses took 2.7 ms so; yielding lowers the 99th
     * percentile to 0.2 ms. One that ran first has closed the gate by now. */
    if (action == HS_ACTION_PAUSE && gate.closed.load() == 0) sched_yield();
}

/* Act as without us. The signal is blocked while its handler runs, so this kill takes effect on return. Only for a STOP
 * in a forked child: DataLoader ends its workers with SIGTERM. */
void default_action(int signo) noexcept {
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    sigaction(signo, &action, nullptr);
    kill(getpid(), signo);
}

void chain(Line &line, int signo, siginfo_t *info, void *context) noexcept {
    const struct sigaction &previous = line.previous;
    if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) return;
    const pid_t self = thread_id();
    if (line.chaining.load() == self) return; /* the old handler chains to us */
    line.chaining.store(self);
    line.passed_on.fetch_add(1);
    if (previous.sa_flags & SA_SIGINFO)
        previous.sa_sigaction(signo, info, context);
    else
        previous.sa_handler(signo);
    line.chaining.store(0);
    /* faulthandler.register(chain=True) passes a signal on by restoring what it found, which is this handler, raising
     * the signal, and installing itself again. Raised while we run, the signal arrives when we return, at that handler,
     * which would pass it to us again, and so on, each in a frame on top of the last until the stack ends (seen). */
    struct sigaction now;
    if (sigaction(signo, nullptr, &now) != 0 || action_is_ours(now) || now.sa_handler != previous.sa_handler) return;
    line.raised_in.store(self);
    const struct sigaction action = action_for(line);
    sigaction(signo, &action, nullptr);
}

/* Whether the chained handler has raised the signal it was given. */
bool came_round(Line &line, const siginfo_t *info) noexcept {
    if (line.raised_in.load() == 0 || info->si_code != SI_TKILL || info->si_pid != getpid()) return false;
    pid_t self = thread_id();
    return line.raised_in.compare_exchange_strong(self, 0);
}

uint32_t causes_of(const Line &line, const siginfo_t *info) noexcept {
    /* The tty driver sends in the kernel's name; `scontrol suspend` and kill(1) in a process's. */
    const bool terminal = line.signo == SIGTSTP && line.action == HS_ACTION_PAUSE && info->si_code == SI_KERNEL;
    return terminal ? static_cast<uint32_t>(HS_CAUSE_TERMINAL) : line.causes;
}

/* While a Run claims the stops, a stop sent to all processes of the job step would cost the rank its children's work,
 * and perhaps the save. The child's creator may still end it (`Process.terminate()`), and once its parent is gone so
 * may any process. */
bool is_meant_for_rank(const Line &line, pid_t owner, const siginfo_t *info) noexcept {
    const bool claimed = line.flags.load() != line.wanted_flags;
    const pid_t parent = owner > 0 ? owner : signals.parent.load(); /* > 0: the fork is still under way */
    if (!claimed || info->si_code > 0 || getppid() != parent) return false;
    return info->si_pid != parent && info->si_pid != signals.rank.load() && info->si_pid != getpid();
}

void on_signal(int signo, siginfo_t *info, void *context) noexcept {
    const int saved_errno = errno;
    const uint8_t index = line_of[signo].load();
    if (index == 0) return; /* other code saved our address before a restart with another table */
    Line &line = signals.lines[index - 1];
    const pid_t owner = signals.owner.load();
    if (came_round(line, info)) {
        /* already handled */
    } else if (owner == getpid()) {
        latch(line.latch, line.action, causes_of(line, info), info->si_code <= 0 ? info->si_pid : 0);
        if (!(line.flags.load() & HS_SIGNAL_NO_CHAIN)) chain(line, signo, info, context);
    } else if (owner == 0) {
        chain(line, signo, info, context); /* stopped, and called by code that saved our address */
    } else if (line.action == HS_ACTION_STOP ? !is_meant_for_rank(line, owner, info)
                                             : (line.wanted_flags & HS_SIGNAL_ONLY_IF_HANDLED) != 0) {
        /* A forked child, or one between vfork and exec: a pause is not meant for it, a stop (or Ctrl-C) is. */
        if (line.previous.sa_handler == SIG_DFL)
            default_action(signo);
        else
            chain(line, signo, info, context);
    }
    errno = saved_errno;
}

bool leave_alone(uint32_t flags, const struct sigaction &previous) noexcept {
    if (previous.sa_handler == SIG_IGN) return !(flags & HS_SIGNAL_EVEN_IF_IGNORED);
    return previous.sa_handler == SIG_DFL && (flags & HS_SIGNAL_ONLY_IF_HANDLED);
}

/* Returns -errno; 0: install it; 1: leave it alone. Changes nothing in the process. */
int prepare_line(Line &line, const hs_signal &wanted) noexcept {
    line.signo = wanted.signo;
    line.action = wanted.action;
    line.causes = wanted.causes;
    line.flags.store(wanted.flags);
    line.wanted_flags = wanted.flags;
    line.installed = false;
    line.chaining.store(0);
    line.raised_in.store(0);
    line.passed_on.store(0);
    if (sigaction(wanted.signo, nullptr, &line.previous) != 0) return -errno;
    return leave_alone(wanted.flags, line.previous) ? 1 : 0;
}

} // namespace

bool action_is_ours(const struct sigaction &action) noexcept {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_signal;
}

void signal_latch(Line &line) noexcept { latch(line.latch, line.action, line.causes, 0); }

/* Block all of our signals in each of our handlers. Otherwise a resume right after its pause would get its frame on top
 * of the pause's and run first, and the rank would stay paused. */
struct sigaction action_for(const Line &line) noexcept {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    const struct sigaction &previous = line.previous;
    const bool chained = !(line.wanted_flags & HS_SIGNAL_NO_CHAIN) && previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN;
    if (chained) {
        action.sa_mask = previous.sa_mask;
        action.sa_flags = SA_SIGINFO | (previous.sa_flags & (SA_RESTART | SA_ONSTACK));
    }
    for (int i = 0; i < signals.n; ++i) sigaddset(&action.sa_mask, signals.lines[i].signo);
    return action;
}

int64_t unique_stamp_ns() noexcept {
    int64_t last = last_stamp_ns.load(), stamp;
    do {
        const int64_t now = mono_ns();
        stamp = now > last ? now : last + 1;
    } while (!last_stamp_ns.compare_exchange_weak(last, stamp));
    return stamp;
}

void request_stamp_raise(RequestStamp &stamp, int64_t stamp_ns) noexcept {
    int64_t seen = stamp.load();
    while (seen < stamp_ns && !stamp.compare_exchange_weak(seen, stamp_ns)) {
    }
}

int signals_check(hs_signal *table, int n) noexcept {
    if (n < 0 || n > kLines || (n > 0 && table == nullptr)) return -EINVAL;
    int bad = 0;
    for (int i = 0; i < n; ++i) {
        const hs_signal &line = table[i];
        bool good = line.signo > 0 && line.signo < NSIG && line.signo != SIGKILL && line.signo != SIGSTOP;
        good = good && line.action >= HS_ACTION_PAUSE && line.action <= HS_ACTION_STOP && !(line.causes & ~kAllCauses);
        good = good && (line.action == HS_ACTION_STOP || line.causes != 0);
        for (int j = 0; j < i; ++j) good = good && table[j].signo != line.signo;
        table[i].result = good ? 0 : -EINVAL;
        if (!good) bad = -EINVAL;
    }
    return bad;
}

int signals_prepare(hs_signal *table, int n) noexcept {
    signals.n = 0;
    for (auto &index : line_of) index.store(0);
    for (int i = 0; i < n; ++i) {
        table[i].result = prepare_line(signals.lines[i], table[i]);
        if (table[i].result < 0) return table[i].result;
        if (table[i].result == 0) line_of[table[i].signo].store(static_cast<uint8_t>(i + 1));
    }
    signals.n = n; /* last: the table is complete */
    return 0;
}

int signals_install(hs_signal *table, int n) noexcept {
    sigset_t ours;
    sigemptyset(&ours);
    for (int i = 0; i < n; ++i) {
        if (table[i].result != 0) continue;
        const struct sigaction action = action_for(signals.lines[i]);
        if (sigaction(table[i].signo, &action, nullptr) != 0) {
            table[i].result = -errno;
            signals_restore();
            return table[i].result;
        }
        signals.lines[i].installed = true;
        sigaddset(&ours, table[i].signo);
    }
    pthread_sigmask(SIG_UNBLOCK, &ours, nullptr);
    return 0;
}

/* Restore the default of signals that only the claim handled; chain the rest again. */
static void unclaim_line(Line &line) noexcept {
    line.flags.store(line.wanted_flags);
    if (!line.installed || line.previous.sa_handler != SIG_DFL || !(line.wanted_flags & HS_SIGNAL_ONLY_IF_HANDLED)) return;
    struct sigaction now;
    if (sigaction(line.signo, nullptr, &now) == 0 && action_is_ours(now)) sigaction(line.signo, &line.previous, nullptr);
    line.installed = false;
}

/* -errno; 1: we handle it; 0: these flags leave it alone. */
static int listen_to(Line &line, uint32_t flags) noexcept {
    struct sigaction now;
    if (sigaction(line.signo, nullptr, &now) != 0) return -errno;
    if (action_is_ours(now)) return 1;
    if (leave_alone(flags, now)) return 0;
    line.previous = now;
    line_of[line.signo].store(static_cast<uint8_t>(&line - signals.lines + 1));
    const struct sigaction action = action_for(line);
    if (sigaction(line.signo, &action, nullptr) != 0) return -errno;
    line.installed = true;
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, line.signo);
    pthread_sigmask(SIG_UNBLOCK, &one, nullptr);
    return 1;
}

/* A handler that came after us is helped like one that was there before: while its thread is held it would never run. */
void signals_help_late() noexcept {
    for (int i = 0; i < signals.n; ++i)
        if (Line &line = signals.lines[i]; !line.installed && line.wanted_flags & HS_SIGNAL_ONLY_IF_HANDLED) listen_to(line, line.wanted_flags);
}

int signals_claim(int action, bool on) noexcept {
    int listening = 0;
    for (int i = 0; i < signals.n; ++i) {
        Line &line = signals.lines[i];
        if (line.action != action) continue;
        if (!on) {
            unclaim_line(line);
            continue;
        }
        line.flags.store(line.wanted_flags | HS_SIGNAL_NO_CHAIN);
        const int result = listen_to(line, line.wanted_flags & ~HS_SIGNAL_ONLY_IF_HANDLED);
        if (result < 0) return result;
        listening += result;
    }
    return listening;
}

int signals_restore() noexcept {
    int replaced = 0;
    for (int i = signals.n - 1; i >= 0; --i) {
        Line &line = signals.lines[i];
        if (!line.installed) continue;
        struct sigaction now;
        if (sigaction(line.signo, nullptr, &now) == 0 && action_is_ours(now))
            sigaction(line.signo, &line.previous, nullptr);
        else
            ++replaced;
        line.installed = false;
    }
    return replaced;
}

void signals_after_fork() noexcept {
    const pid_t owner = signals.owner.load();
    if (owner == 0) return;
    if (owner != kForkedChild) signals.rank.store(owner);
    signals.parent.store(getppid());
    signals.owner.store(kForkedChild);
}

void signals_clear_latches() noexcept {
    for (Line &line : signals.lines) line.latch.count.store(0);
    for (Latch &latch : signals.requests) latch.count.store(0);
    for (int bit = 0; bit < kCauses; ++bit) {
        signals.pause[bit].store(0);
        signals.resume[bit].store(0);
    }
    signals.stop.store(0);
}

} // namespace hs

using namespace hs;

int hs_gate_request(int action, uint32_t causes) {
    if (action < HS_ACTION_PAUSE || action > HS_ACTION_STOP || (causes & ~kAllCauses)) return -EINVAL;
    if (action != HS_ACTION_STOP && causes == 0) return -EINVAL;
    if (action == HS_ACTION_PAUSE && (causes & HS_CAUSE_TERMINAL)) return -EINVAL;
    if (gate.owner.load() != getpid()) return -ESRCH;
    latch(signals.requests[action], action, causes, 0);
    return 0;
}
