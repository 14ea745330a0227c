/* NVTX: what happens to this process, as marks and ranges that a profiler such as nsys records, in the domain "hydroslurm".
 *
 *   mark  clock                                payload: CLOCK_MONOTONIC read right before it. A reader lines the profiler's clock
 *                                              up with the event log by these
 *   mark  pause_request, resume_request,       payload: the stamp that the signal's handler took; category: the signal, 0 for a
 *         stop_request                         request. Emitted by the watcher, because handlers may call nothing of NVTX
 *   mark  gate_closed, at_rest, gate_opened    payload: the stamp of the request that closed the gate; when all threads were at
 *                                              rest; the stamp of the request that opened it. Right behind the begin of
 *                                              pausing, its end, and the begin of resuming
 *   range pausing, resuming                    start/end; payload: number of the pause. Closing .. parked, opening .. running
 *   range parked                               push/pop in each held thread, as long as it is held; payload: the pause
 *   range draining                             start/end; payload: the pause
 *   range saving, committing, requeueing       start/end; payload: the step
 *   range step                                 start/end, from one safe point to the next; payload: the step. Only if asked for
 *   range aten::addmm ...                      push/pop; every operator of every thread. Only if asked for
 *
 * All payloads are uint64, stamps are CLOCK_MONOTONIC nanoseconds: the numbers of the event log, exactly.
 *
 * Without a tool in the process every call ends at one comparison. Nothing here may be called from a signal handler.
 */
#ifndef HYDROSLURM_MARKS_H
#define HYDROSLURM_MARKS_H

#include <stdint.h>

#include "gate.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HS_MARKS_EVENTS 1u    /* all but the next two */
#define HS_MARKS_STEPS 2u
#define HS_MARKS_OPERATORS 4u /* a callback at every operator, for as long as it is on */

enum hs_range {
    HS_RANGE_PAUSING = 0,
    HS_RANGE_PARKED = 1,
    HS_RANGE_RESUMING = 2,
    HS_RANGE_DRAINING = 3,
    HS_RANGE_SAVING = 4,
    HS_RANGE_COMMITTING = 5,
    HS_RANGE_REQUEUEING = 6,
    HS_RANGE_STEP = 7,
    HS_RANGE_VACATING = 8,
    HS_RANGE_RESTORING = 9,
};
#define HS_RANGES 10

#define HS_NO_RANGE UINT64_MAX

/* What to emit from now on: bits, 0 for nothing. Returns the bits in force: 0 when no tool listens, or when this library
 * was built without NVTX. A forked child emits nothing until it calls this itself.
 * -EINVAL: unknown bits. -errno: torch refused the callback of the operators; the rest is in force. */
HS_API int hs_marks_use(uint32_t bits);

/* The name that a signal's category has in the tool. */
HS_API void hs_marks_name_signal(int signo, const char *name);

/* A range that may end in another thread. HS_NO_RANGE when nobody listens, which hs_marks_end() ignores. */
HS_API uint64_t hs_marks_begin(int range, uint64_t payload);
HS_API void hs_marks_end(uint64_t id);

/* A mark of the script's own. */
HS_API void hs_marks_message(const char *message);

#ifdef __cplusplus
}
#endif
#endif
