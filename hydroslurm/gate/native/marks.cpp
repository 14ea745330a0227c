/* The only file that knows NVTX. Its headers find the tool themselves (NVTX_INJECTION64_PATH); without one there is no
 * domain, and nothing else is called. */
#include "marks.h"

#include <errno.h>

#include "internal.h"

#ifdef HS_WITH_NVTX
#include <nvtx3/nvToolsExt.h>
#endif

namespace hs {

std::atomic<uint32_t> marks_bits{0};
pthread_mutex_t marks_mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the search for a tool */

void marks_after_fork() noexcept { marks_bits.store(0); }

#ifdef HS_WITH_NVTX

namespace {

nvtxDomainHandle_t domain = nullptr;
nvtxStringHandle_t range_names[HS_RANGES];
nvtxStringHandle_t request_names[4];
nvtxStringHandle_t moment_names[3];
nvtxStringHandle_t clock_name;

constexpr const char *kRanges[HS_RANGES] = {"pausing", "parked", "resuming", "draining", "saving", "committing", "requeueing", "step", "vacating", "restoring"};
constexpr const char *kRequests[4] = {"", "pause_request", "resume_request", "stop_request"}; /* by enum hs_action */
constexpr const char *kMoments[3] = {"gate_closed", "at_rest", "gate_opened"}; /* by enum Moment */

nvtxEventAttributes_t attributes(nvtxStringHandle_t name, uint64_t payload) noexcept {
    nvtxEventAttributes_t event = {};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    event.message.registered = name;
    event.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    event.payload.ullValue = payload;
    return event;
}

nvtxEventAttributes_t text(const char *message) noexcept {
    nvtxEventAttributes_t event = {};
    event.version = NVTX_VERSION;
    event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    event.messageType = NVTX_MESSAGE_TYPE_ASCII;
    event.message.ascii = message != nullptr ? message : "";
    return event;
}

/* Once per process: a domain is never destroyed. */
bool find_tool() noexcept {
    const Locked locked(marks_mutex);
    if (domain == nullptr) {
        nvtxDomainHandle_t made = nvtxDomainCreateA("hydroslurm");
        if (made != nullptr) {
            for (int i = 0; i < HS_RANGES; ++i) range_names[i] = nvtxDomainRegisterStringA(made, kRanges[i]);
            for (int i = 1; i < 4; ++i) request_names[i] = nvtxDomainRegisterStringA(made, kRequests[i]);
            for (int i = 0; i < 3; ++i) moment_names[i] = nvtxDomainRegisterStringA(made, kMoments[i]);
            clock_name = nvtxDomainRegisterStringA(made, "clock");
            domain = made;
        }
    }
    return domain != nullptr;
}

} // namespace

void mark_clock() noexcept {
    if (!marks_on()) return;
    nvtxEventAttributes_t event = attributes(clock_name, 0);
    event.payload.ullValue = static_cast<uint64_t>(mono_ns());
    nvtxDomainMarkEx(domain, &event);
}

void mark_request(int action, int signo, int64_t stamp_ns) noexcept {
    if (!marks_on() || action < HS_ACTION_PAUSE || action > HS_ACTION_STOP) return;
    mark_clock();
    nvtxEventAttributes_t event = attributes(request_names[action], static_cast<uint64_t>(stamp_ns));
    event.category = static_cast<uint32_t>(signo);
    nvtxDomainMarkEx(domain, &event);
}

void mark_moment(Moment moment, int64_t stamp_ns) noexcept {
    if (!marks_on()) return;
    const nvtxEventAttributes_t event = attributes(moment_names[moment], static_cast<uint64_t>(stamp_ns));
    nvtxDomainMarkEx(domain, &event);
}

bool mark_held() noexcept {
    if (!marks_on()) return false;
    mark_clock();
    const nvtxEventAttributes_t event = attributes(range_names[HS_RANGE_PARKED], pause_number());
    nvtxDomainRangePushEx(domain, &event);
    return true;
}

void mark_released() noexcept { nvtxDomainRangePop(domain); }

void operator_begun(const char *name) noexcept {
    callback_drop_inherited(OPERATORS);
    const nvtxEventAttributes_t event = text(name);
    nvtxDomainRangePushEx(domain, &event);
}

void operator_ended() noexcept { nvtxDomainRangePop(domain); }


#else

void mark_clock() noexcept {}
void mark_request(int, int, int64_t) noexcept {}
void mark_moment(Moment, int64_t) noexcept {}
bool mark_held() noexcept { return false; }
void mark_released() noexcept {}
void operator_begun(const char *) noexcept {}
void operator_ended() noexcept {}

#endif

} // namespace hs

using namespace hs;

#ifdef HS_WITH_NVTX

int hs_marks_use(uint32_t bits) {
    constexpr uint32_t all = HS_MARKS_EVENTS | HS_MARKS_STEPS | HS_MARKS_OPERATORS;
    if (bits & ~all) return -EINVAL;
    const uint32_t wanted = bits != 0 && find_tool() ? bits : 0;
    const bool operators = marks_bits.load() & HS_MARKS_OPERATORS;
    int error = 0;
    if (operators && !(wanted & HS_MARKS_OPERATORS)) callback_off(OPERATORS);
    marks_bits.store(wanted);
    if (wanted & HS_MARKS_OPERATORS && !operators) error = callback_on(OPERATORS);
    if (error < 0) marks_bits.fetch_and(~HS_MARKS_OPERATORS);
    mark_clock();
    return error < 0 ? error : static_cast<int>(wanted);
}

void hs_marks_name_signal(int signo, const char *name) {
    if (marks_on() && name != nullptr) nvtxDomainNameCategoryA(domain, static_cast<uint32_t>(signo), name);
}

uint64_t hs_marks_begin(int range, uint64_t payload) {
    if (!marks_on() || range < 0 || range >= HS_RANGES) return HS_NO_RANGE;
    mark_clock();
    const nvtxEventAttributes_t event = attributes(range_names[range], payload);
    return nvtxDomainRangeStartEx(domain, &event);
}

void hs_marks_end(uint64_t id) {
    if (id == HS_NO_RANGE || !marks_on()) return;
    nvtxDomainRangeEnd(domain, id);
    mark_clock();
}

void hs_marks_message(const char *message) {
    if (!marks_on()) return;
    const nvtxEventAttributes_t event = text(message);
    nvtxDomainMarkEx(domain, &event);
}

#else

int hs_marks_use(uint32_t bits) { return bits & ~(HS_MARKS_EVENTS | HS_MARKS_STEPS | HS_MARKS_OPERATORS) ? -EINVAL : 0; }
void hs_marks_name_signal(int, const char *) {}
uint64_t hs_marks_begin(int, uint64_t) { return HS_NO_RANGE; }
void hs_marks_end(uint64_t) {}
void hs_marks_message(const char *) {}

#endif
