/* A device with one queue, for Python: what a training launches runs behind its back. */
#include "fake_stream.h"

#define API extern "C" __attribute__((visibility("default")))

static Stream &queue() {
    static Stream *one = new Stream; /* as long as the process */
    return *one;
}

API void device_launch(int64_t took_ns) { queue().launch(took_ns); }
API void device_stick(int on) { queue().stuck = on != 0; }
API void device_synchronize() { queue().synchronize(); }
API int64_t device_queued() { return queue().launched - queue().finished; }
API int64_t device_finished_ns() { return queue().finished_ns; }
API int device_waiting() { return queue().waiting; }
