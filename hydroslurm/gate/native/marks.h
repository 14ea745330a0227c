/* NVTX marks and ranges of this process for a profiler such as nsys, in the domain "hydroslurm".
 *
 *   mark  clock                                payload: CLOCK_MONOTONIC read just before. These marks align the profiler's
 *                                              clock with the event log
 *   mark  pause_request, resume_request,       payload: the signal handler's stamp; category: the signal, 0 for a request.
 *         stop_request                         The watcher emits them, because handlers must not call NVTX
 *   mark  gate_closed, at_rest, gate_opened    payload: stamp of the request that closed the gate; when all threads were at
 *                                              rest; stamp of the request that opened it. They directly follow the begin of
 *                                              pausing, its end, and the begin of resuming
 *   range pausing, resuming                    start/end; payload: number of the pause. Closing .. parked, opening .. running
 *   range parked                               push/pop in each held thread, while it is held; payload: the pause
 *   range draining                             start/end; payload: the pause
 *   range saving, committing, requeueing       start/end; payload: the step
 *   range step                                 start/end, from one safe point to the next; payload: the step. Optional
 *   range aten::addmm ...                      push/pop; every operator of every thread. Optional
 *
 * All payloads are uint64, stamps are CLOCK_MONOTONIC nanoseconds: exactly the numbers of the event log.
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
#define HS_MARKS_OPERATORS 4u /* a callback at every operator while it is on */

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

/* Set what is emitted from now on: bits, 0 for nothing. Returns the bits in force: 0 when no tool listens, or when this
 * library was built without NVTX. A forked child emits nothing until it calls this itself.
 * -EINVAL: unknown bits. -errno: torch refused the operators' callback; the rest is in force. */
HS_API int hs_marks_use(uint32_t bits);

/* Name a signal's category in the tool. */
HS_API void hs_marks_name_signal(int signo, const char *name);

/* A range that may end in another thread. HS_NO_RANGE if no tool listens, which hs_marks_end() ignores. */
HS_API uint64_t hs_marks_begin(int range, uint64_t payload);
HS_API void hs_marks_end(uint64_t id);

/* Emit a mark of the script. */
HS_API void hs_marks_message(const char *message);

#ifdef __cplusplus
}
#endif
#endif
