/* A closed gate that lets training threads run to a collective: the requests, and which threads may pass. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

namespace hs {

/* torch's own collectives, c10d::allreduce_ and so on, including those of DDP, FSDP and the functional ones, which call these
 * (seen in torch 2.13). Sends and receives count, too, as in torch's sequence numbers. check_for_nan reads a tensor and sends
 * nothing. */
bool is_collective(const char *name) noexcept {
    return name != nullptr && strncmp(name, "c10d::", 6) == 0 && strcmp(name + 6, "check_for_nan") != 0;
}

namespace {

bool take_one(std::atomic<int64_t> &allowance) noexcept {
    int64_t left = allowance.load();
    while (left > 0)
        if (allowance.compare_exchange_weak(left, left - 1)) return true;
    return false;
}

} // namespace

bool window_admits(uint32_t closing, const char *name, bool backward_node) noexcept {
    CollectiveWindow &window = gate.window;
    if (window.closing.load() != closing) return false;
    if (!backward_node && is_collective(name)) {
        if (!take_one(window.allowance)) return false;
        window.collectives.fetch_add(1);
    }
    window.steps.fetch_add(1); /* before reading the state; the watcher does both in reverse */
    if (gate.state.load() == HS_STATE_PARKED) watcher_wake();
    return true;
}

bool window_has_moved() noexcept {
    const CollectiveWindow &window = gate.window;
    return window.calls.load() != window.taken.load() || window.steps.load() != window.parked_steps.load();
}

void window_clear() noexcept {
    CollectiveWindow &window = gate.window;
    window.closing.store(0);
    window.allowance.store(0);
    window.collectives.store(0);
    window.wanted.store(0);
    window.ended.store(false);
    window.taken.store(window.calls.load());
}

} // namespace hs

using namespace hs;

int hs_gate_let_through(int64_t n) {
    if (n < 0 || n > INT32_MAX) return -EINVAL;
    if (gate.owner.load() != getpid()) return -ESRCH;
    if (n == 0) return 0;
    gate.window.wanted_ns.store(unique_stamp_ns());
    gate.window.wanted.fetch_add(n);
    gate.window.calls.fetch_add(1);
    watcher_wake();
    return 0;
}

int hs_gate_hold_here(void) {
    if (gate.owner.load() != getpid()) return -ESRCH;
    gate.window.wanted.store(0); /* requested before this call, and not in force yet */
    gate.window.ended_ns.store(unique_stamp_ns());
    gate.window.ended.store(true);
    watcher_wake();
    return 0;
}
