/* Tracing: count every operator, record the first ones, hold no thread. */
#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

namespace hs {

pthread_mutex_t trace_mutex = PTHREAD_MUTEX_INITIALIZER;

namespace {

constexpr int kKeepMax = 50'000'000;

struct Trace {
    std::atomic<bool> on{false};
    std::atomic<int> writers{0};
    std::atomic<int64_t> count{0};
    int keep = 0;
    bool collectives = false;
    hs_traced *kept = nullptr;
};
Trace trace;

} // namespace

void operator_traced(const char *name, bool backward_node) noexcept {
    trace.writers.fetch_add(1);
    const bool on = trace.on.load();
    if (on && (!trace.collectives || (!backward_node && is_collective(name)))) {
        const int64_t index = trace.count.fetch_add(1);
        if (index < trace.keep) {
            hs_traced &entry = trace.kept[index];
            entry.mono_ns = mono_ns();
            entry.tid = thread_id();
            entry.phase = backward_node || arming().in_backward() ? HS_PHASE_BACKWARD : HS_PHASE_FORWARD;
            strncpy(entry.text, name != nullptr ? name : "", HS_TEXT_BYTES - 1);
        }
    } else if (!on) {
        callback_drop_inherited(TRACE);
    }
    trace.writers.fetch_sub(1);
}

void trace_after_fork() noexcept {
    trace.on.store(false);
    trace.writers.store(0);
    trace.kept = nullptr; /* left to the parent: another thread may have been writing to it */
}

} // namespace hs

using namespace hs;

int hs_gate_trace_start(int keep, int collectives) {
    if (keep < 0 || keep > kKeepMax) return -EINVAL;
    const Locked locked(trace_mutex);
    if (trace.on.load()) return -EBUSY;
    if (keep > 0 && (trace.kept = static_cast<hs_traced *>(calloc(static_cast<size_t>(keep), sizeof(hs_traced)))) == nullptr) return -ENOMEM;
    trace.keep = keep;
    trace.collectives = collectives != 0;
    trace.count.store(0);
    trace.on.store(true);
    const int result = callback_on(TRACE);
    if (result < 0) {
        trace.on.store(false);
        free(trace.kept);
        trace.kept = nullptr;
    }
    return result;
}

int64_t hs_gate_trace_count(void) { return trace.count.load(); }

int hs_gate_trace_stop(hs_traced *out, int n) {
    if (n < 0 || (n > 0 && out == nullptr)) return -EINVAL;
    const Locked locked(trace_mutex);
    if (!trace.on.exchange(false)) return -EINVAL;
    callback_off(TRACE);
    while (trace.writers.load() > 0) sched_yield(); /* callbacks that had begun */
    const int64_t kept = trace.count.load() < trace.keep ? trace.count.load() : trace.keep;
    const int copied = kept < n ? static_cast<int>(kept) : n;
    if (copied > 0) memcpy(out, trace.kept, static_cast<size_t>(copied) * sizeof(hs_traced));
    free(trace.kept);
    trace.kept = nullptr;
    return copied;
}
