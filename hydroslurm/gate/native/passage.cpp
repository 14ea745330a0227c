/* A closed gate that lets training threads go on to a collective: what is asked for, and who may pass. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "internal.h"

namespace hs {
namespace {

/* torch's own collectives, c10d::allreduce_ and so on, DDP's, FSDP's and the functional ones included: those call these
 * (seen in torch 2.13). Sends and receives are among them, as in torch's sequence numbers. check_for_nan looks at a
 * tensor and sends nothing. */
bool is_collective(const char *name) noexcept {
    return name != nullptr && strncmp(name, "c10d::", 6) == 0 && strcmp(name + 6, "check_for_nan") != 0;
}

bool take_one(std::atomic<int64_t> &allowance) noexcept {
    int64_t left = allowance.load();
    while (left > 0)
        if (allowance.compare_exchange_weak(left, left - 1)) return true;
    return false;
}

} // namespace

bool passage_takes(uint32_t closing, const char *name, bool backward_node) noexcept {
    Passage &passage = gate.passage;
    if (passage.closing.load() != closing) return false;
    if (!backward_node && is_collective(name)) {
        if (!take_one(passage.allowance)) return false;
        passage.collectives.fetch_add(1);
    }
    passage.steps.fetch_add(1); /* before the state is looked at; the watcher does both the other way round */
    if (gate.state.load() == HS_STATE_PARKED) bell_ring();
    return true;
}

bool passage_moves() noexcept {
    const Passage &passage = gate.passage;
    return passage.calls.load() != passage.taken.load() || passage.steps.load() != passage.parked_steps.load();
}

void passage_clear() noexcept {
    Passage &passage = gate.passage;
    passage.closing.store(0);
    passage.allowance.store(0);
    passage.collectives.store(0);
    passage.wanted.store(0);
    passage.ended.store(false);
    passage.taken.store(passage.calls.load());
}

} // namespace hs

using namespace hs;

int hs_gate_let_through(int64_t n) {
    if (n < 0 || n > INT32_MAX) return -EINVAL;
    if (gate.owner.load() != getpid()) return -ESRCH;
    if (n == 0) return 0;
    gate.passage.wanted_ns.store(unique_stamp_ns());
    gate.passage.wanted.fetch_add(n);
    gate.passage.calls.fetch_add(1);
    bell_ring();
    return 0;
}

int hs_gate_hold_here(void) {
    if (gate.owner.load() != getpid()) return -ESRCH;
    gate.passage.wanted.store(0); /* asked for before this call, and not in force yet */
    gate.passage.ended_ns.store(unique_stamp_ns());
    gate.passage.ended.store(true);
    bell_ring();
    return 0;
}
