/* A thread at an operator while the callback is armed: let it pass, or hold it until the gate opens. */
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include <new>

#include "internal.h"

namespace hs {

Release release;

namespace {

std::atomic<Slot *> first_slot{nullptr};

/* Python's functions, found by name: the library also serves programs without an interpreter, and one binary serves every
 * Python. hs_gate_start() sets them before the first callback. */
struct Python {
    int (*holds_gil)() = nullptr;
    void *(*thread_state)() = nullptr;
    void *(*current)() = nullptr;
    int (*finalizing)() = nullptr;
    void *(*save_thread)() = nullptr;
    void (*restore_thread)(void *) = nullptr;
};
Python python;

template <typename Function> void find(Function &function, const char *name, const char *older = nullptr) noexcept {
    void *symbol = dlsym(RTLD_DEFAULT, name);
    if (symbol == nullptr && older != nullptr) symbol = dlsym(RTLD_DEFAULT, older);
    function = reinterpret_cast<Function>(symbol);
}

/* A thread's own facts. `trains` stays true; false may change (a thread that enters Python). */
struct Self {
    pid_t tid = 0;
    bool trains = false;
    bool collective = false;
    bool exempt = false;
    Slot *slot = nullptr;
    ~Self() {
        if (slot != nullptr) slot->tid.store(0);
    }
};
thread_local Self self;

void classify_thread() noexcept {
    self.tid = thread_id();
    if (self.tid == getpid()) {
        self.trains = true;
        return;
    }
    char comm[16];
    thread_name(self.tid, comm);
    self.trains = name_is_autograd(comm);
    self.collective = name_is_collective(comm);
}

bool must_wait() noexcept {
    if (self.exempt) return false;
    if (self.tid == 0) classify_thread();
    if (self.trains) return true;
    if (self.collective || python.thread_state == nullptr) return false;
    return self.trains = python.thread_state() != nullptr;
}

Slot *my_slot() noexcept {
    if (self.slot != nullptr) return self.slot;
    for (Slot *slot = first_slot.load(); slot != nullptr; slot = slot->next) {
        pid_t nobody = 0;
        if (slot->tid.compare_exchange_strong(nobody, self.tid)) return self.slot = slot;
    }
    Slot *slot = new (std::nothrow) Slot;
    if (slot == nullptr) return nullptr;
    slot->tid.store(self.tid);
    slot->next = first_slot.load();
    while (!first_slot.compare_exchange_weak(slot->next, slot)) {
    }
    return self.slot = slot;
}

/* PyGILState_Check() alone returns 1 in every thread once a sub-interpreter exists (3.10 to 3.12), and releasing a GIL that
 * is not held is a fatal error. So the current thread state must also be ours. */
bool holds_gil() noexcept {
    if (python.holds_gil == nullptr || python.save_thread == nullptr || python.restore_thread == nullptr) return false;
    if (!python.holds_gil()) return false;
    return python.current == nullptr || python.thread_state == nullptr || python.current() == python.thread_state();
}

bool python_ends() noexcept { return python.finalizing != nullptr && python.finalizing(); }

/* If the interpreter ended while this daemon thread was held, taking the GIL would unwind the thread through torch's frames,
 * which aborts the process. Newer Pythons hang such a thread instead, and so do we. */
void take_gil_back(void *state) noexcept {
    if (python_ends())
        for (;;) pause();
    python.restore_thread(state);
}

void enter(Slot &slot, uint32_t closing, int64_t now_ns, const char *name, bool backward) noexcept {
    char text[HS_TEXT_BYTES] = {};
    strncpy(text, name != nullptr ? name : "", HS_TEXT_BYTES - 1);
    for (size_t i = 0; i < HS_TEXT_BYTES / 8; ++i) {
        uint64_t word;
        memcpy(&word, text + 8 * i, 8);
        slot.text[i].store(word, std::memory_order_relaxed);
    }
    slot.phase.store(backward ? HS_PHASE_BACKWARD : HS_PHASE_FORWARD, std::memory_order_relaxed);
    slot.since_ns.store(now_ns, std::memory_order_relaxed);
    slot.visit.fetch_add(1, std::memory_order_relaxed);
    slot.held.store(closing);
    watcher_wake();
}

void report_release(uint32_t closing) noexcept {
    uint32_t reported = release.closing.load();
    while (reported < closing)
        if (release.closing.compare_exchange_weak(reported, closing)) {
            release.tid.store(self.tid);
            release.mono_ns.store(mono_ns());
            release.ready.store(closing);
            watcher_wake();
            return;
        }
}

void hold(Slot &slot, int64_t reached_ns, const char *name, bool backward_node) noexcept {
    void *gil = nullptr;
    uint32_t entered = 0;
    bool passes = false, marked = false;
    for (;;) {
        const uint32_t generation = gate.generation.load(); /* read first: it advances after the two answers below change */
        const uint32_t closing = gate.closed.load();
        if (closing == 0 || (passes = window_admits(closing, name, backward_node))) break;
        const bool asked_again = closing == entered && slot.generation.load() != generation;
        slot.generation.store(generation);
        if (closing != entered) { /* first time, or closed again before this thread woke */
            const bool backward = backward_node || arming().in_backward();
            if (marked) mark_released();
            marked = mark_held();
            enter(slot, closing, entered == 0 ? reached_ns : mono_ns(), name, backward);
            entered = closing;
            if (gil == nullptr && holds_gil()) gil = python.save_thread();
        } else if (asked_again) {
            watcher_wake(); /* until now this thread could not count as held */
        }
        futex_wait(gate.generation, generation, -1);
    }
    /* A passing thread still waits for the GIL. Keep its slot marked as held, in a past generation, until it has it, or the
     * watcher reports it as quiet. */
    if (passes)
        slot.captured.store(0);
    else
        slot.held.store(0);
    if (gil != nullptr) take_gil_back(gil);
    slot.held.store(0);
    if (marked) mark_released();
    if (entered != 0 && gate.closed.load() != entered) report_release(entered);
}

} // namespace

void operator_reached(const char *name, bool backward_node) noexcept {
    const uint32_t closing = gate.closed.load();
    if (closing == 0) {
        /* Just opened, or a child forked from a closed gate, which nothing else would disarm. */
        callback_drop_inherited(HOLD);
        return;
    }
    const int64_t reached_ns = mono_ns();
    if (!must_wait() || python_ends()) {
        gate.passed.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    Slot *slot = my_slot();
    if (slot == nullptr) { /* out of memory: do not hold a thread unseen */
        gate.passed.fetch_add(1, std::memory_order_relaxed);
        return;
    }
    if (arming().capturing()) {
        if (slot->captured.exchange(closing) != closing) gate.capturing.fetch_add(1);
        return;
    }
    hold(*slot, reached_ns, name, backward_node);
}

bool thread_trains() noexcept { return must_wait() && !python_ends(); }

void *gil_give_up() noexcept { return holds_gil() ? python.save_thread() : nullptr; }

void gil_take_back(void *state) noexcept {
    if (state != nullptr) take_gil_back(state);
}

Slot *slots_first() noexcept { return first_slot.load(); }

int slots_held(uint32_t closing) noexcept {
    int held = 0;
    for (Slot *slot = first_slot.load(); closing != 0 && slot != nullptr; slot = slot->next)
        held += slot->tid.load() != 0 && slot->held.load() == closing;
    return held;
}

void slot_text(const Slot &slot, char *out) noexcept {
    for (size_t i = 0; i < HS_TEXT_BYTES / 8; ++i) {
        const uint64_t word = slot.text[i].load(std::memory_order_relaxed);
        memcpy(out + 8 * i, &word, 8);
    }
    out[HS_TEXT_BYTES - 1] = '\0';
}

void hold_find_python() noexcept {
    find(python.holds_gil, "PyGILState_Check");
    find(python.thread_state, "PyGILState_GetThisThreadState");
    find(python.current, "PyThreadState_GetUnchecked", "_PyThreadState_UncheckedGet");
    find(python.finalizing, "Py_IsFinalizing", "_Py_IsFinalizing");
    find(python.save_thread, "PyEval_SaveThread");
    find(python.restore_thread, "PyEval_RestoreThread");
}

void hold_after_fork() noexcept {
    for (Slot *slot = first_slot.load(); slot != nullptr; slot = slot->next) {
        slot->tid.store(0);
        slot->held.store(0);
    }
    self.tid = 0;
    self.trains = self.collective = false;
    self.slot = nullptr;
}

} // namespace hs

int hs_gate_exempt(int on) {
    const int old = hs::self.exempt;
    hs::self.exempt = on != 0;
    return old;
}
