/* Shared by the gate's parts. Only torch_gate.cpp knows torch, behind Arming.
 *
 *   signals.cpp   handlers and requests -> latches           runs in signal handlers
 *   guard.cpp     handlers that others install over ours
 *   watcher.cpp   latches -> open, close, parked             one thread, the only one that arms
 *   hold.cpp      a thread at an operator: pass or wait      runs in training threads
 *   collective_window.cpp   a closed gate that lets collectives pass   asked in training threads
 *   threads.cpp   which threads train, which are asleep      reads /proc, for the watcher
 *   events.cpp    the queue to the reader                    any thread but handlers
 *   trace.cpp     records operators, holds nothing
 *   launch_ahead.cpp   bounds launches ahead of the device   asked in training threads
 *   marks.cpp     NVTX marks and ranges                      any thread but handlers; see marks.h
 *   core.cpp      start, stop, status, fork
 */
#ifndef HYDROSLURM_GATE_INTERNAL_H
#define HYDROSLURM_GATE_INTERNAL_H

#include <pthread.h>
#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "gate.h"
#include "marks.h"

namespace hs {

/* --- the seam to torch; C++ tests have their own -------------------------------------------------------------- */

/* Callbacks that torch makes at every operator: each calls one of the functions operator_*() below. */
enum Callback { HOLD, TRACE, LAUNCHES, OPERATORS, kCallbacks };

struct Arming {
    int (*on)(Callback);   /* register it: 0 or -errno */
    void (*off)(Callback); /* remove it, if it is registered; running callbacks continue */
    bool (*any)();         /* is any global callback registered at all? */
    bool (*in_backward)(); /* does the calling thread run a node of the autograd graph? */
    bool (*capturing)();   /* does the calling thread capture a CUDA graph? Must never initialise CUDA */
};
const Arming &arming();

/* A forked child inherits torch's list of callbacks, whose lock may be in any state: the child's first operator removes them. */
int callback_on(Callback which) noexcept;
void callback_off(Callback which) noexcept;
void callback_drop_inherited(Callback which) noexcept;

/* A queue of a device, as torch numbers them. */
struct DeviceStream {
    int32_t device = 0;
    int64_t stream = 0;
    bool operator==(const DeviceStream &other) const noexcept { return device == other.device && stream == other.stream; }
};

/* The device with bounded launches. None of these functions initialises a device. */
struct Device {
    bool (*use)(int type);                                    /* a number of c10::DeviceType; false: torch lacks the device */
    bool (*stream_of_thread)(DeviceStream *out);              /* the calling thread's launch stream; false: none */
    bool (*record)(const DeviceStream &, void **event);       /* after all launches; creates the event if it is nullptr */
    bool (*is_finished)(const DeviceStream &, void *event);   /* all work before the event; also true for a failed device */
};
const Device &device();

/* Called by the callbacks. They neither throw nor lock. */
void operator_reached(const char *name, bool backward_node) noexcept;
void operator_traced(const char *name, bool backward_node) noexcept;
void operator_launches() noexcept;
void operator_begun(const char *name) noexcept;
void operator_ended() noexcept;

/* --- locks and forks ------------------------------------------------------------------------------------------ */

struct Locked {
    explicit Locked(pthread_mutex_t &mutex) noexcept : mutex_(mutex) { pthread_mutex_lock(&mutex_); }
    ~Locked() { pthread_mutex_unlock(&mutex_); }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;

  private:
    pthread_mutex_t &mutex_;
};

/* Held during fork(), so that the child finds what they guard whole; then each part begins anew in the child. */
extern pthread_mutex_t trace_mutex, ahead_mutex, marks_mutex, events_mutex;
void trace_after_fork() noexcept;
void ahead_after_fork() noexcept;
void marks_after_fork() noexcept;
void events_after_fork() noexcept;
int forks_watch() noexcept; /* 0, or -errno: children would inherit the parent's state */

/* --- clocks and futexes ------------------------------------------------------------------------------------- */

constexpr int64_t kMs = 1'000'000;
int64_t mono_ns() noexcept;  /* [signal-safe] */
int64_t epoch_ns() noexcept; /* [signal-safe] */
pid_t thread_id() noexcept;  /* [signal-safe] */

using Word = std::atomic<uint32_t>;
void futex_wait(Word &word, uint32_t seen, int64_t timeout_ns) noexcept; /* timeout < 0: none. May wake spuriously */
void futex_wake(Word &word, int n) noexcept;                             /* [signal-safe] */

/* --- latches: written by handlers, read by the watcher ------------------------------------------------------ */

static_assert(std::atomic<uint64_t>::is_always_lock_free, "handlers need lock-free 64-bit atomics");

constexpr int kCauses = 6;
constexpr uint32_t kAllCauses = (1u << kCauses) - 1;

/* Count of requests of one kind, and the last one. */
struct Latch {
    std::atomic<uint64_t> count{0};
    std::atomic<int64_t> stamp_ns{0};
    std::atomic<int32_t> sender{0};
};

/* Stamp of the newest request for one cause and direction. Stamps are CLOCK_MONOTONIC, made unique in this process, so
 * they also order all requests. A cause is in force while its pause is newer than its resume: with a latch rather than
 * a queue, any number of signals in any order ends in the right state. */
using RequestStamp = std::atomic<int64_t>;

struct Line {
    int signo;
    int action;
    uint32_t causes;
    std::atomic<uint32_t> flags; /* the handler reads them while hs_gate_claim() changes them */
    uint32_t wanted_flags;       /* as hs_gate_start() was given them */
    bool installed;
    struct sigaction previous;
    std::atomic<pid_t> chaining; /* thread inside `previous`, to cut a chain that leads back to us */
    std::atomic<pid_t> raised_in; /* thread in which `previous` has raised the signal again */
    std::atomic<uint32_t> passed_on; /* signals given to `previous` that did not return to hs_gate_deliver() */
    Latch latch;
};

constexpr int kLines = 32;
constexpr pid_t kForkedChild = -1;

struct Signals {
    Line lines[kLines];
    int n = 0;
    std::atomic<pid_t> owner{0};  /* process the signals are meant for; 0: stopped; kForkedChild */
    std::atomic<pid_t> rank{0};   /* in a forked child: the ancestor they are meant for ... */
    std::atomic<pid_t> parent{0}; /* ... and the process that forked this one */
    Latch requests[4]; /* by action, for hs_gate_request() */
    RequestStamp pause[kCauses] = {};
    RequestStamp resume[kCauses] = {};
    RequestStamp stop{0};
};
extern Signals signals;

int signals_check(hs_signal *table, int n) noexcept;
int signals_prepare(hs_signal *table, int n) noexcept; /* before the watcher starts, which reads the lines */
int signals_install(hs_signal *table, int n) noexcept; /* all or nothing */
int signals_claim(int action, bool on) noexcept;      /* see hs_gate_claim() */
int signals_restore() noexcept;                        /* returns how many were no longer ours */
void signals_help_late() noexcept;                     /* see hs_gate_check_handlers() */
int signals_replaced() noexcept;                       /* the same without restoring; an event for each */
int signals_retake(int signo, bool chain) noexcept;    /* see hs_gate_retake() */
int signals_deliver(int signo) noexcept;                /* [signal-safe] */
bool action_is_ours(const struct sigaction &action) noexcept;
struct sigaction action_for(const Line &line) noexcept;
void signal_latch(Line &line) noexcept;                 /* as its handler does, with unknown sender. [signal-safe] */
void signals_after_fork() noexcept;                    /* in the child */
void signals_clear_latches() noexcept;
int64_t unique_stamp_ns() noexcept;                     /* [signal-safe] */
void request_stamp_raise(RequestStamp &stamp, int64_t stamp_ns) noexcept; /* [signal-safe] */

/* --- the gate itself ---------------------------------------------------------------------------------------- */

/* Inside a closing: training threads run from one collective to the next; see hs_gate_let_through(). */
struct CollectiveWindow {
    std::atomic<uint32_t> closing{0};    /* the closing with a window; 0: none */
    std::atomic<int64_t> allowance{0};   /* collectives that may still pass */
    std::atomic<int64_t> collectives{0}; /* collectives passed in this closing */
    std::atomic<uint64_t> steps{0};      /* operators passed by training threads: a thread runs */
    std::atomic<uint64_t> parked_steps{0}; /* `steps` when all were last at rest */
    /* requested, but not yet in force */
    std::atomic<int64_t> wanted{0};
    std::atomic<int64_t> wanted_ns{0};
    std::atomic<bool> ended{false};
    std::atomic<int64_t> ended_ns{0};
    std::atomic<uint32_t> calls{0}; /* of hs_gate_let_through(), counted after `wanted` */
    std::atomic<uint32_t> taken{0}; /* calls handled by the watcher */
};

bool is_collective(const char *name) noexcept; /* an operator of torch.distributed that communicates */
/* Whether a training thread may pass this operator of a closed gate; counts it if so. */
bool window_admits(uint32_t closing, const char *name, bool backward_node) noexcept;
bool window_has_moved() noexcept; /* has a thread moved, or may it, since all were at rest? */
void window_clear() noexcept; /* while the gate is open */

struct Gate {
    std::atomic<pid_t> owner{0};  /* the process that started it; 0: stopped */
    Word wakeup{0};               /* futex of the watcher: woken when there is work */
    std::atomic<uint32_t> closed{0}; /* 0 open, else the number of this closing */
    Word generation{0};            /* futex of held threads: advanced when one may have to run */
    std::atomic<uint32_t> last_closing{0}; /* numbers are never reused, even by the next start */
    std::atomic<uint32_t> opening{0}; /* the closing being opened, or last opened; see gate_open() */
    std::atomic<int32_t> let_go{0};   /* threads released by this opening */
    std::atomic<int64_t> opened_mono_ns{0};
    std::atomic<int32_t> state{HS_STATE_RUNNING};
    std::atomic<uint32_t> causes{0};
    std::atomic<int32_t> quiet{0};
    std::atomic<int32_t> capturing{0};
    std::atomic<int64_t> passed{0};
    std::atomic<int64_t> closes{0}; /* since the start: the number of the pause, as in the event log */
    std::atomic<int64_t> closed_mono_ns{0};
    std::atomic<bool> armed{false};
    std::atomic<bool> quit{false};
    pthread_mutex_t arming = PTHREAD_MUTEX_INITIALIZER; /* also taken around fork() */
    CollectiveWindow window;
};
extern Gate gate;

inline uint64_t pause_number() noexcept { return static_cast<uint64_t>(gate.closes.load()); }

inline void watcher_wake() noexcept { /* [signal-safe] */
    gate.wakeup.fetch_add(1);
    futex_wake(gate.wakeup, 1);
}

/* Make held threads check again whether they are held. [signal-safe] */
inline void generation_advance() noexcept {
    gate.generation.fetch_add(1);
    futex_wake(gate.generation, INT32_MAX);
}

/* Release the threads held by a closing. A resume's handler does this itself: it usually runs in the held thread, which
 * continues without waking two more threads (median resume 94 us through the watcher, 50 us so). The watcher then sees
 * the open gate, reports it and disarms. False: another thread opens it, or did. [signal-safe] */
bool gate_open(uint32_t closing) noexcept;

int arm() noexcept;
void disarm() noexcept;
void *watcher_main(void *) noexcept;

/* --- held threads ------------------------------------------------------------------------------------------- */

/* One for each thread that was ever held, reused when it ends. Its thread writes it, the watcher reads it. */
struct Slot {
    std::atomic<pid_t> tid{0};
    std::atomic<uint32_t> held{0};     /* the closing that holds it; 0: it runs */
    std::atomic<uint32_t> generation{0}; /* `gate.generation` when it last had to wait */
    std::atomic<uint32_t> visit{0};    /* how often it was held */
    std::atomic<uint32_t> captured{0}; /* the closing during which a graph capture let it through */
    std::atomic<int64_t> since_ns{0};
    std::atomic<int32_t> phase{0};
    std::atomic<uint64_t> text[HS_TEXT_BYTES / 8] = {};
    uint32_t reported = 0; /* watcher only: the last visit it reported */
    Slot *next = nullptr;
};
Slot *slots_first() noexcept;
int slots_held(uint32_t closing) noexcept;
void slot_text(const Slot &slot, char *out) noexcept;
bool thread_trains() noexcept;    /* does a closed gate hold the calling thread? */
void *gil_give_up() noexcept;     /* nullptr: this thread does not have it */
void gil_take_back(void *) noexcept;
void hold_find_python() noexcept; /* looks up the interpreter's functions, if any */
void hold_after_fork() noexcept;

/* The first thread to run again, once per closing. */
struct Release {
    std::atomic<uint32_t> closing{0};
    std::atomic<int32_t> tid{0};
    std::atomic<int64_t> mono_ns{0};
    std::atomic<uint32_t> ready{0};
};
extern Release release;

/* --- threads of this process -------------------------------------------------------------------------------- */

bool name_is_autograd(const char *comm) noexcept;
bool name_is_collective(const char *comm) noexcept;
void thread_name(pid_t tid, char (&comm)[16]) noexcept; /* empty if it is gone */
std::vector<pid_t> autograd_threads();

struct Activity {
    enum { GONE, RUNNING, ASLEEP, UNKNOWN } state;
    uint64_t ran; /* grows whenever the thread runs */
};
Activity thread_activity(pid_t tid) noexcept;
bool terminal_may_stop_us() noexcept; /* false: our process group is orphaned */

/* --- events and traces -------------------------------------------------------------------------------------- */

hs_event event_of(hs_event_kind kind) noexcept; /* both clocks and the causes filled in */
void event_text(hs_event &event, const char *text) noexcept;
void event_push(const hs_event &event) noexcept;
void events_announce() noexcept; /* write the eventfd if events were pushed since */
void events_use_fd(int fd) noexcept;

extern std::atomic<uint32_t> marks_bits; /* HS_MARKS_*; 0 if no tool listens */
inline bool marks_on() noexcept { return marks_bits.load(std::memory_order_relaxed) != 0; }
void mark_clock() noexcept;
void mark_request(int action, int signo, int64_t stamp_ns) noexcept;
bool mark_held() noexcept; /* begin this thread's range `parked`; false: not emitted, and needs no end */
void mark_released() noexcept;
enum Moment { MOMENT_CLOSED, MOMENT_AT_REST, MOMENT_OPENED };
void mark_moment(Moment moment, int64_t stamp_ns) noexcept;

} // namespace hs
#endif
