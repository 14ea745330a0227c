/* The operator gate: holds every training thread of this process at its next PyTorch operator, and releases it.
 *
 * A process has one gate. A signal or a request CLOSES it; when its last cause goes, it OPENS:
 *
 *   handler or request: latch and wake        (async-signal-safe, no lock, no allocation)
 *   -> watcher thread:  arm the callback      (needs no GIL, and no torch lock that a held thread could have)
 *   -> training thread: waits on a futex at its next operator, without the GIL
 *
 * The callback is registered only while the gate is closed, so a running program pays nothing.
 *
 * Held threads: the main thread, autograd's (named pt_autograd_*), and any thread that has a Python thread state and
 * is not exempt. All others pass and are counted; so do the threads of collective backends (named pt_gloo*, pt_nccl*,
 * pt_tcpstore*), even inside a Python callback, because a collective in flight needs them. A thread inside a CUDA
 * graph capture also passes, and so do all threads while the Python interpreter shuts down.
 *
 * PARKED waits for the main thread, autograd's, and every thread that was held before; a user's thread that is held
 * for the first time may follow, and is reported as late.
 *
 * Ranks that wait for each other inside collectives must park at the same one. hs_gate_let_through() opens a
 * COLLECTIVE WINDOW in a closed gate: training threads run on, up to the first collective beyond its allowance.
 *
 * A forked child has an open gate, no watcher, and may start its own. Until then it neither acts on a pause or resume
 * nor dies of one. A STOP signal, or one with HS_SIGNAL_ONLY_IF_HANDLED, acts on it as before us. But a claimed STOP
 * counts only if it comes from the child's parent or the started process, or if the parent is gone.
 *
 * Every function returns 0 or a count >= 0 on success, and -errno on failure. None prints, exits or throws.
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

/* What a signal requests. */
enum hs_action {
    HS_ACTION_PAUSE = 1,  /* adds the cause */
    HS_ACTION_RESUME = 2, /* removes causes: one or more bits */
    HS_ACTION_STOP = 3,   /* opens the gate for good: a stop wins over a pause. The old handler is then called */
};

/* Why the gate is closed: bits of a set. The rank runs only while the set is empty. */
enum hs_cause {
    HS_CAUSE_SLURM = 1,    /* SIGTSTP sent by a process: scontrol suspend, gang scheduling */
    HS_CAUSE_USER = 2,     /* SIGUSR1 */
    HS_CAUSE_API = 4,      /* hs_gate_request() */
    HS_CAUSE_TERMINAL = 8, /* SIGTSTP from the terminal's driver: Ctrl-Z */
    HS_CAUSE_PEERS = 16,   /* hs_gate_request(): another rank of the job is paused */
    HS_CAUSE_VACATED = 32, /* hs_gate_request(), while the gate is closed: device memory is on the host. Keeps the
                              gate closed even for a stop, since the next operator would read missing memory */
};

/* One line of the signal table given to hs_gate_start(). */
struct hs_signal {
    int32_t signo;
    int32_t action; /* enum hs_action */
    uint32_t causes; /* bits of enum hs_cause. HS_CAUSE_SLURM of a SIGTSTP line becomes HS_CAUSE_TERMINAL if the
                       kernel sent it (si_code SI_KERNEL); a SIGCONT line names both bits */
    uint32_t flags; /* HS_SIGNAL_* */
    int32_t result; /* out: 0 installed; 1 left alone, as it was ignored before us; -errno */
};
#define HS_SIGNAL_EVEN_IF_IGNORED 1u /* install even if the signal was ignored (nohup) */
#define HS_SIGNAL_NO_CHAIN 2u        /* do not call the earlier handler */
#define HS_SIGNAL_ONLY_IF_HANDLED 4u /* leave SIG_DFL alone (result 1): for signals with their own meaning */

enum hs_event_kind {
    HS_EVENT_SIGNAL_RECEIVED = 1,  /* signo (0: a request), sender_pid, text ("pause", "resume"), mono_ns of the last,
                                      count (since the last check) */
    HS_EVENT_GATE_CLOSED = 2,      /* the callback is armed; value_ns: stamp of the request that closed it */
    HS_EVENT_FIRST_OPERATOR_HELD = 3,       /* tid, text (operator), phase */
    HS_EVENT_PARKED = 4,           /* no training thread issues anything; held, quiet; value_ns: stamp of the request
                                      that closed the gate; mono_ns: when this became true, not when it was noticed;
                                      count: collectives let through since the gate closed; text, in a window:
                                      operator of the thread held last. Once per closing without a window; in
                                      one, each time all threads are at rest after one has moved */
    HS_EVENT_RESUMED = 5,      /* value_ns: stamp of the request that opened it; passed: operators of exempt threads;
                                      held: threads released; count: collectives let through */
    HS_EVENT_FIRST_OPERATOR_RELEASED = 6,   /* tid; mono_ns: the thread runs again. None if no thread was held */
    HS_EVENT_LATE_OPERATOR_HELD = 7,        /* after PARKED a quiet or unknown thread reached the gate: tid, text, phase */
    HS_EVENT_CAUSES_CHANGED = 8,   /* a request that did not move the gate, even if the set is the same; causes. With a
                                      text, and an errno in count: torch refused the callback; retried every 200 ms */
    HS_EVENT_STOP_REQUESTED = 9,   /* signo, sender_pid, value_ns: the handler's stamp */
    HS_EVENT_TERMINAL_STOP = 10,   /* parked for Ctrl-Z; SIGSTOP to ourselves comes next */
    HS_EVENT_TERMINAL_STOP_IGNORED = 11, /* Ctrl-Z in an orphaned process group: ignored, as the kernel would */
    HS_EVENT_CALLBACK_LOST = 12,   /* other code cleared the global callbacks while the gate was closed; armed again */
    HS_EVENT_HANDLER_REPLACED = 13, /* signo: the installed handler is no longer ours */
    HS_EVENT_EVENTS_DROPPED = 14,         /* count: events that found the queue full */
    HS_EVENT_LET_THROUGH = 15,     /* now in force; count: number of collectives (0: hs_gate_hold_here());
                                      value_ns: stamp of the call. An earlier PARKED in the queue predates it */
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
    char text[HS_TEXT_BYTES]; /* operator, cut to fit, ended by NUL */
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
    int64_t closes;    /* how often the gate has been closed since hs_gate_start() */
    int64_t closed_mono_ns; /* 0 while open */
    int64_t allowance;      /* collectives that may still be issued in this window */
    int64_t let_through;    /* collectives that were issued in it */
};

HS_API int hs_gate_abi(void);

/* Start the watcher and install the handlers, from any thread; on failure undo everything.
 * event_fd: the caller's eventfd, written (1) whenever there is an event to read; -1 for none.
 * -EALREADY: running in this process (a forked child may start its own). -EINVAL: a bad table (unknown action
 * or cause, SIGKILL, SIGSTOP, the same signal twice); signals[i].result says which line.
 * Unblocks the table's signals in the calling thread. A chained old handler keeps its SA_RESTART, so a Python handler
 * interrupts what it used to; without one, system calls restart. */
HS_API int hs_gate_start(struct hs_signal *signals, int n_signals, int event_fd);

/* Open, disarm, end the watcher, restore the handlers that are still ours. 0 also when not running.
 * The only way out of HS_STATE_STOPPING. Unread events stay readable.
 * Returns how many handlers others had replaced, which are left as they are. */
HS_API int hs_gate_stop(void);

/* Request an action from inside the process, with the same latches and order as a signal. [signal-safe]
 * -EINVAL: unknown action or cause, or a pause for HS_CAUSE_TERMINAL. -ESRCH: not running in this process. */
HS_API int hs_gate_request(int action, uint32_t causes);

/* Let the training threads run on with the gate closed until they have issued n more collectives: operators whose name
 * begins with "c10d::". A thread is held before the first one beyond that; all its other operators pass, even with no
 * allowance left. Calls add up. The allowance is lost when the gate opens: the next closing begins without one. Exempt
 * threads pass uncounted. From this call on hs_gate_status() says PARKING; a closing that was PARKED is PARKED again
 * when all threads are at rest. [signal-safe]
 * 0 without effect: n is 0, or the gate is open. -EINVAL: n < 0 or above INT32_MAX. -ESRCH: not running here. */
HS_API int hs_gate_let_through(int64_t n);

/* Close the window: drop the rest of its allowance, and hold every thread at its next operator of any kind.
 * 0 also if there is none. -ESRCH: not running in this process. [signal-safe] */
HS_API int hs_gate_hold_here(void);

HS_API int hs_gate_status(struct hs_status *out);

/* Copy out up to n events, oldest first; never block. */
HS_API int hs_gate_read(struct hs_event *out, int n);

/* 1: operators of the calling thread always pass (and are counted); 0: the rule applies. Returns the old value. */
HS_API int hs_gate_exempt(int on);

/* on: handle every signal of the table with this action, including those left alone for lack of a handler, and stop
 * chaining: the caller answers for what follows. Replaces handlers that others installed over ours. Ignored signals
 * stay ignored, unless their line says otherwise. off: as hs_gate_start() left them. Returns the number of handled
 * signals (off: 0).
 * -ESRCH: not running in this process. -EINVAL: unknown action. */
HS_API int hs_gate_claim(int action, int on);

/* Compare the installed handlers with ours; HS_EVENT_HANDLER_REPLACED for each that differs. Returns their number.
 * Signals of HS_SIGNAL_ONLY_IF_HANDLED that were left alone are listened to from here on if they have a handler now. */
HS_API int hs_gate_check_handlers(void);

/* 1: the installed handler of this signal is ours; 0: it is not. */
HS_API int hs_gate_owns(int signo);

/* Install our handler over the one that replaced it. chain 1: that one becomes the old handler: it is called as the
 * line says, and hs_gate_stop() restores it; 0: the old handler stays the same.
 * 1: done; 0: ours is installed. -ESRCH: not running in this process. -EINVAL: not a signal that we handle. */
HS_API int hs_gate_retake(int signo, int chain);

/* Another handler was called for this signal and leads to us: latch the signal, unless our own handler had passed it
 * on. 1: the caller must call the handler from before us; 0: it must not.
 * -ESRCH: not running in this process, or not a signal that we handle. [signal-safe] */
HS_API int hs_gate_deliver(int signo);

/* Tracing: arm a callback that holds nothing and records each operator, for debugging and counting.
 * keep: how many to record (the rest are only counted). collectives: 1: count and record only collectives.
 * -EBUSY while tracing. Works without hs_gate_start(). */
struct hs_traced {
    int64_t mono_ns;
    int32_t tid;
    int32_t phase;
    char text[HS_TEXT_BYTES];
};
HS_API int hs_gate_trace_start(int keep, int collectives);
HS_API int64_t hs_gate_trace_count(void);
HS_API int hs_gate_trace_stop(struct hs_traced *out, int n); /* -EINVAL: not tracing. Returns the number copied */

/* Limit the work, in nanoseconds, that training threads may launch on each stream of a device beyond what it has finished;
 * one kernel, compiled region or graph replay may exceed it. 0, the default: no bound, at no cost. device_type: a number
 * of c10::DeviceType. Works without hs_gate_start(); call it once the device is in use.
 * -ENODEV: torch has no such device here. -EINVAL: a negative bound. */
HS_API int hs_gate_bound_launches(int device_type, int64_t bound_ns);

/* Effects of the bound since it was set. */
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
