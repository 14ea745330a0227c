/* The operator gate: hold every training thread of this process at its next PyTorch operator, and let it go.
 *
 * One process has one gate. A signal or a request CLOSES it, the last cause to go OPENS it:
 *
 *   handler or request: latch and wake        (async-signal-safe, no lock, no allocation)
 *   -> watcher thread:  arm the callback      (no GIL, no torch lock is ever needed by a held thread)
 *   -> training thread: waits on a futex at its next operator; the GIL is given up first if it was held
 *
 * The callback is registered only while the gate is closed, so that a running program pays nothing at all.
 *
 * Which threads are held: the main thread, autograd's (named pt_autograd_*), and any thread that has a Python
 * thread state and is not exempt. All others pass, and are counted; so do the threads of collective backends
 * (named pt_gloo*, pt_nccl*, pt_tcpstore*) even while they run a Python callback, because a collective in flight
 * needs them. A thread inside a CUDA graph capture is let through as well, and so is everybody while the Python
 * interpreter shuts down.
 *
 * PARKED waits for the main thread, autograd's, and every thread that was held before; a thread of the user's own
 * that is held for the first time may follow, and is reported as late.
 *
 * Ranks that wait for each other inside collectives have to be parked at the same one. hs_gate_let_through() opens a
 * COLLECTIVE WINDOW in a closed gate: training threads run on, and are held before the first collective beyond its allowance.
 *
 * A forked child has an open gate, no watcher, and may start its own. Until then it
 * neither acts on a pause or a resume nor dies of one; a STOP signal, and one with HS_SIGNAL_ONLY_IF_HANDLED, does in it
 * what it did before we came, but for a STOP that is claimed: that counts when it comes from the child's parent or from
 * the process that was started, or when the parent is gone.
 *
 * Every function returns 0 or a count >= 0 on success, and -errno on failure. Nothing here prints, exits or throws.
 * Unless marked [signal-safe], a function must not be called from a signal handler.
 */
#ifndef HYDROSLURM_GATE_H
#define HYDROSLURM_GATE_H

#include <stdint.h>

#define HS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define HS_GATE_ABI 8

/* What a signal asks for. */
enum hs_action {
    HS_ACTION_PAUSE = 1,  /* adds the cause */
    HS_ACTION_RESUME = 2, /* removes the cause (bits may be several) */
    HS_ACTION_STOP = 3,   /* opens the gate for good: a stop wins over a pause. The old handler is then called */
};

/* Why the gate is closed: bits of a set. The rank runs only while the set is empty. */
enum hs_cause {
    HS_CAUSE_SLURM = 1,    /* SIGTSTP sent by a process: scontrol suspend, gang scheduling */
    HS_CAUSE_USER = 2,     /* SIGUSR1 */
    HS_CAUSE_API = 4,      /* hs_gate_request() */
    HS_CAUSE_TERMINAL = 8, /* SIGTSTP from the terminal's driver: Ctrl-Z */
    HS_CAUSE_PEERS = 16,   /* hs_gate_request(): another rank of the job is paused */
    HS_CAUSE_VACATED = 32, /* hs_gate_request(), while the gate is closed: device memory is away. A gate that is closed
                              stays closed for it even when a stop comes: the next operator would read what is not there */
};

/* One line of the signal table given to hs_gate_start(). */
struct hs_signal {
    int32_t signo;
    int32_t action; /* enum hs_action */
    uint32_t causes; /* bits of enum hs_cause. A SIGTSTP line with HS_CAUSE_SLURM becomes HS_CAUSE_TERMINAL by itself
                       when the kernel sent it (si_code SI_KERNEL); a SIGCONT line names both bits */
    uint32_t flags; /* HS_SIGNAL_* */
    int32_t result; /* out: 0 installed; 1 left alone, it was ignored when we came; -errno */
};
#define HS_SIGNAL_EVEN_IF_IGNORED 1u /* install although the signal was ignored (nohup) */
#define HS_SIGNAL_NO_CHAIN 2u        /* do not call the handler that was there before */
#define HS_SIGNAL_ONLY_IF_HANDLED 4u /* leave SIG_DFL alone (result 1): for signals that have a meaning of their own */

enum hs_event_kind {
    HS_EVENT_SIGNAL_RECEIVED = 1,  /* signo (0: a request), sender_pid, text ("pause", "resume"), mono_ns of the last,
                                      count (how often since the last look) */
    HS_EVENT_GATE_CLOSED = 2,      /* the callback is armed; value_ns: stamp of the request that closed it */
    HS_EVENT_FIRST_OPERATOR_HELD = 3,       /* tid, text (operator), phase */
    HS_EVENT_PARKED = 4,           /* no training thread issues anything; held, quiet; value_ns: the stamp of the request
                                      that closed the gate; mono_ns: when that became true, not when it was noticed;
                                      count: collectives let through since the gate closed; in a window text: the
                                      operator of the thread that was held last. Once per closing without a
                                      window; in one, again each time all threads are at rest after one of them moved */
    HS_EVENT_RESUMED = 5,      /* value_ns: stamp of the request that opened it; passed: operators of exempt threads; held: threads let go;
                                      count: collectives let through */
    HS_EVENT_FIRST_OPERATOR_RELEASED = 6,   /* tid; mono_ns: the thread runs again. Absent when no thread was held */
    HS_EVENT_LATE_OPERATOR_HELD = 7,        /* a thread that was quiet or unknown reached the gate after PARKED: tid, text, phase */
    HS_EVENT_CAUSES_CHANGED = 8,   /* a request that did not move the gate, changed set or not; causes. With a text and an errno in
                                      count: torch refused the callback, tried again every 200 ms */
    HS_EVENT_STOP_REQUESTED = 9,   /* signo, sender_pid, value_ns: the handler's stamp */
    HS_EVENT_TERMINAL_STOP = 10,   /* parked for Ctrl-Z; SIGSTOP to ourselves comes next */
    HS_EVENT_TERMINAL_STOP_IGNORED = 11, /* Ctrl-Z in an orphaned process group: ignored, as the kernel would */
    HS_EVENT_CALLBACK_LOST = 12,   /* somebody cleared the global callbacks while the gate was closed; armed again */
    HS_EVENT_HANDLER_REPLACED = 13, /* signo: the handler that is installed is not ours any more */
    HS_EVENT_EVENTS_DROPPED = 14,         /* count: events that found the queue full */
    HS_EVENT_LET_THROUGH = 15,     /* in force from now on; count: how many collectives (0: hs_gate_hold_here());
                                      value_ns: stamp of the call. A PARKED before it in the queue is about the time before */
};

enum hs_phase { HS_PHASE_FORWARD = 0, HS_PHASE_BACKWARD = 1 };

#define HS_TEXT_BYTES 64

struct hs_event {
    int32_t kind;       /* enum hs_event_kind */
    int32_t signo;      /* 0: a request, not a signal */
    int64_t mono_ns;    /* CLOCK_MONOTONIC when it happened */
    int64_t epoch_ns;   /* CLOCK_REALTIME of the same moment, as seen when the event was recorded */
    int64_t value_ns;   /* see the kind */
    uint32_t causes;    /* the set after the event */
    int32_t sender_pid; /* 0: the kernel or unknown */
    int32_t tid;
    int32_t phase;      /* enum hs_phase */
    int32_t held;       /* threads held now */
    int32_t quiet;      /* training threads that are asleep and have issued nothing since arming */
    int64_t count;
    int64_t passed;
    char text[HS_TEXT_BYTES]; /* operator, cut to fit, always ended by NUL */
};

enum hs_state { HS_STATE_RUNNING = 0, HS_STATE_PARKING = 1, HS_STATE_PARKED = 2, HS_STATE_STOPPING = 3 };

struct hs_status {
    int32_t state; /* enum hs_state */
    uint32_t causes;
    int32_t held;
    int32_t quiet;
    int32_t armed;
    int32_t capturing; /* threads let through by a CUDA graph capture since the gate closed */
    int32_t window_open; /* this closing has a collective window */
    int64_t passed;    /* operators of exempt threads since the gate closed */
    int64_t closes;    /* how often the gate has been closed */
    int64_t closed_mono_ns; /* 0 while open */
    int64_t allowance;      /* collectives that may still be issued in this window */
    int64_t let_through;    /* collectives that were issued in it */
};

HS_API int hs_gate_abi(void);

/* Start the watcher and install the handlers, from any thread. On failure nothing is left behind.
 * event_fd: an eventfd of the caller's that is written (1) whenever there is an event to read; -1 for none.
 * -EALREADY: running in this process (a forked child may start its own). -EINVAL: a bad table (unknown action
 * or cause, SIGKILL, SIGSTOP, the same signal twice); signals[i].result says which line.
 * Signals of the table are unblocked in the calling thread. Where an old handler is chained, its SA_RESTART is kept,
 * so that a Python handler still interrupts what it interrupted; where none is, calls are restarted. */
HS_API int hs_gate_start(struct hs_signal *signals, int n_signals, int event_fd);

/* Open, disarm, end the watcher, restore the handlers that are still ours. 0 also when not running.
 * The only way out of HS_STATE_STOPPING. Events that were not read stay readable.
 * Returns the number of signals whose handler had been replaced by somebody else and was left alone. */
HS_API int hs_gate_stop(void);

/* Ask from inside the process. Same latches and same order as a signal. [signal-safe]
 * -EINVAL: unknown action or cause, or a pause for HS_CAUSE_TERMINAL. -ESRCH: not running in this process. */
HS_API int hs_gate_request(int action, uint32_t causes);

/* Let the training threads go on, while the gate stays closed, until n more collectives have been issued: operators whose
 * name begins with "c10d::". A thread is held before the one that would be too many; all its other operators pass, also
 * when nothing is left, up to that point. What is left of an earlier call is added to. It is lost when the gate opens:
 * the next closing begins without. Exempt threads pass uncounted. hs_gate_status() says PARKING from this call on, a
 * closing that was PARKED is so again when all have come to rest. [signal-safe]
 * 0 with nothing done: n is 0, or the gate is open. -EINVAL: n < 0 or above INT32_MAX. -ESRCH: not running here. */
HS_API int hs_gate_let_through(int64_t n);

/* Close the window: the rest of its allowance is lost, and a thread that is not held is held at its next operator of any kind.
 * 0 also when there is none. -ESRCH: not running in this process. [signal-safe] */
HS_API int hs_gate_hold_here(void);

HS_API int hs_gate_status(struct hs_status *out);

/* Copy up to n events out, oldest first; never blocks. */
HS_API int hs_gate_read(struct hs_event *out, int n);

/* 1: operators of the calling thread always pass (and are counted); 0: the rule applies. Returns the old value. */
HS_API int hs_gate_exempt(int on);

/* on: listen to every signal of the table that has this action, also to those that were left alone because nobody
 * handled them, and call no old handler any more: whoever claims them answers for what follows. A handler that
 * somebody put over ours since is replaced. What is ignored stays ignored, unless the line says otherwise.
 * off: as hs_gate_start() had left them. Returns how many signals are listened to (off: 0).
 * -ESRCH: not running in this process. -EINVAL: unknown action. */
HS_API int hs_gate_claim(int action, int on);

/* Compare the installed handlers with ours; HS_EVENT_HANDLER_REPLACED for each that differs. Returns their number. */
HS_API int hs_gate_check_handlers(void);

/* 1: the installed handler of this signal is ours; 0: it is not. */
HS_API int hs_gate_owns(int signo);

/* Put our handler over the one that somebody installed in its place. chain 1: that one counts as the old handler from
 * now on: it is called as the line says, and hs_gate_stop() puts it back; 0: the old handler stays what it was.
 * 1: done; 0: it is ours. -ESRCH: not running in this process. -EINVAL: not a signal that we listen to. */
HS_API int hs_gate_retake(int signo, int chain);

/* A handler that is not ours was called for this signal, and leads to us: latch it, unless it is our own handler that
 * had passed it on. 1: the caller is to call the handler that was there before us; 0: it is not.
 * -ESRCH: not running in this process, or not a signal that we listen to. [signal-safe] */
HS_API int hs_gate_deliver(int signo);

/* Tracing: arm a callback that holds nothing and writes down each operator, for debugging and for counting.
 * keep: how many to write down (the rest are only counted). collectives: 1: no others are counted or written down.
 * -EBUSY while tracing. Works without hs_gate_start(). */
struct hs_traced {
    int64_t mono_ns;
    int32_t tid;
    int32_t phase;
    char text[HS_TEXT_BYTES];
};
HS_API int hs_gate_trace_start(int keep, int collectives);
HS_API int64_t hs_gate_trace_count(void);
HS_API int hs_gate_trace_stop(struct hs_traced *out, int n); /* -EINVAL: not tracing. Returns how many were copied */

/* Let training threads launch at most so much work of a device, in nanoseconds, beyond what it has finished, on each of its
 * streams; one kernel, compiled region or replay of a graph may come on top. 0: no bound, which is how it begins, and which
 * costs nothing. device_type: a number of c10::DeviceType. Works without hs_gate_start(); to be called once the device is in use.
 * -ENODEV: torch has no such device here. -EINVAL: a negative bound. */
HS_API int hs_gate_bound_launches(int device_type, int64_t bound_ns);

/* What that has done since it was switched on. */
struct hs_launch_ahead {
    int64_t bound_ns;
    int64_t events;    /* recorded */
    int64_t waits;     /* of training threads for the device */
    int64_t waited_ns; /* in these */
};
HS_API int hs_gate_launches(struct hs_launch_ahead *out);

#ifdef __cplusplus
}
#endif
#endif
