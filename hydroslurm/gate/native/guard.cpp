/* Handlers that others install over ours: detect, replace, and serve them meanwhile. */
#include <errno.h>
#include <unistd.h>

#include "internal.h"

namespace hs {
namespace {

bool is_installed(const Line &line, struct sigaction &now) noexcept {
    return sigaction(line.signo, nullptr, &now) == 0 && action_is_ours(now);
}

Line *line_of_signal(int signo) noexcept {
    for (int i = 0; i < signals.n; ++i)
        if (signals.lines[i].signo == signo && signals.lines[i].installed) return &signals.lines[i];
    return nullptr;
}

} // namespace

int signals_replaced() noexcept {
    int replaced = 0;
    for (int i = 0; i < signals.n; ++i) {
        const Line &line = signals.lines[i];
        struct sigaction now = {};
        if (!line.installed || is_installed(line, now)) continue;
        hs_event event = event_of(HS_EVENT_HANDLER_REPLACED);
        event.signo = line.signo;
        event_push(event);
        ++replaced;
    }
    events_announce();
    return replaced;
}

int signals_retake(int signo, bool chain) noexcept {
    Line *line = line_of_signal(signo);
    if (line == nullptr) return -EINVAL;
    struct sigaction now = {};
    if (is_installed(*line, now)) return 0;
    if (chain) line->previous = now;
    line->passed_on.store(0); /* what reaches Python from here on was either seen by us, or is older */
    const struct sigaction action = action_for(*line);
    return sigaction(signo, &action, nullptr) == 0 ? 1 : -errno;
}

/* Python calls the handler it shows for us in two cases: we passed a signal on, or a signal reached CPython's handler while
 * that replaced ours. Only the second is a new request, even if the call comes after we took the signal back: a main thread
 * inside a long backward() is late. */
int signals_deliver(int signo) noexcept {
    Line *line = line_of_signal(signo);
    if (line == nullptr) return -ESRCH;
    struct sigaction now = {};
    const bool passed_on = line->passed_on.exchange(0) != 0;
    if (!passed_on || !is_installed(*line, now)) signal_latch(*line);
    return line->flags.load() & HS_SIGNAL_NO_CHAIN ? 0 : 1;
}

} // namespace hs

using namespace hs;

int hs_gate_owns(int signo) {
    const Line *line = line_of_signal(signo);
    struct sigaction now = {};
    return line != nullptr && is_installed(*line, now) ? 1 : 0;
}

int hs_gate_deliver(int signo) { return signals.owner.load() == getpid() ? signals_deliver(signo) : -ESRCH; }
