/* How far launches may be ahead of a device. */
#include "fake_device.h"

namespace {

hs_launch_ahead launches() {
    hs_launch_ahead out;
    CHECK_EQ(hs_gate_launches(&out), 0);
    return out;
}

} // namespace

/* Kernels that become a thousand times longer exceed the bound once, by what was in the slices, and then no more. */
TEST(kernels_that_become_longer_are_found_out) {
    WithDevice with;
    CHECK_EQ(hs_gate_bound_launches(20, 10 * kMillisecond), 0);
    until([] { /* not an event for each launch, once a busy machine lets the device finish without a break */
        const int64_t events = launches().events;
        operate(1'000, 2 * kUs);
        return launches().events - events < 1'000 / 8;
    });
    operate(40, 2 * kMillisecond);
    until([&] { return with.device.stream(0).queued_ns.load() == 0; });
    operate(40, 2 * kMillisecond); /* to the end of a slice that was begun before */
    CHECK(operate(60, 2 * kMillisecond) <= 10 * kMillisecond);
}

/* The device never waits for the thread: something is queued behind the kernel that runs, once it is known how long they take. */
TEST(the_device_is_kept_busy) {
    WithDevice with;
    CHECK_EQ(hs_gate_bound_launches(20, 40 * kMillisecond), 0);
    operate(40, kMillisecond);
    int idle = 0;
    for (int i = 0; i < 200; ++i) idle += operate(kMillisecond) == 0;
    CHECK(idle < 20);
}

/* Each stream has its own bound, and threads that no gate would hold (collectives' own, exempt savers) have none. */
TEST(streams_are_bounded_each) {
    WithDevice with;
    CHECK_EQ(hs_gate_bound_launches(20, 4 * kMillisecond), 0);
    with.device.stream(1).stuck.store(true);
    current = 1;
    operate(1, 0);
    current = 0;
    CHECK(operate(200, 200 * kUs) <= 4 * kMillisecond);
    with.device.stream(1).stuck.store(false);
    CHECK_EQ(hs_gate_exempt(1), 0);
    CHECK(operate(100, 200 * kUs) > 5 * kMillisecond);
    hs_gate_exempt(0);
}

/* A thread that waits for a device which never gets there is held all the same when the gate closes, as if it were not waiting. */
TEST(a_wait_ends_when_the_gate_closes) {
    WithDevice with;
    start_usual();
    CHECK_EQ(hs_gate_bound_launches(20, kMillisecond), 0);
    operate(20, kMillisecond);
    with.device.stream(0).stuck.store(true);
    std::atomic<bool> end{false};
    std::thread controller([&] {
        Stream &stream = with.device.stream(0);
        until([&] { return stream.launched.load() > stream.finished.load() && stream.queued_ns.load() >= kMillisecond; });
        usleep(20'000); /* it waits by now, or will */
        pause_now();
        CHECK_EQ(until_event(HS_EVENT_PARKED).held, 1);
        CHECK(stream.launched.load() - stream.finished.load() <= 5); /* not the twenty of a thread that does not wait */
        with.device.stream(0).stuck.store(false);
        end.store(true);
        resume_now();
    });
    while (!end.load()) operate(kMillisecond);
    controller.join();
    hs_gate_stop();
}

/* No event is recorded into a CUDA graph that is being captured, nor asked for meanwhile. */
TEST(a_capture_is_left_alone) {
    WithDevice with;
    CHECK_EQ(hs_gate_bound_launches(20, kMillisecond), 0);
    operate(10, 100 * kUs);
    const int64_t events = launches().events;
    fake_capture = true;
    operate(200, 100 * kUs);
    CHECK_EQ(launches().events, events);
    fake_capture = false;
    operate(50, 100 * kUs);
    CHECK(launches().events > events);
}

/* Without a bound a thread launches everything at once; with one no more than that is ever queued before a launch. It can be
 * switched off and on again, for another bound; bad values and devices that are not there are refused. */
TEST(a_bound_can_be_changed) {
    WithDevice with;
    CHECK(operate(300, 200 * kUs) > 30 * kMillisecond);
    until([&] { return with.device.stream(0).queued_ns.load() == 0; });
    CHECK_EQ(hs_gate_bound_launches(20, -1), -EINVAL);
    CHECK_EQ(hs_gate_bound_launches(21, kMillisecond), -ENODEV);
    CHECK(!fake.bounding.load());
    CHECK_EQ(hs_gate_bound_launches(20, 2 * kMillisecond), 0);
    CHECK(operate(100, 200 * kUs) <= 2 * kMillisecond);
    CHECK(launches().waits > 0);
    CHECK(launches().waited_ns > 0);
    CHECK_EQ(launches().bound_ns, 2 * kMillisecond);
    until([&] { return with.device.stream(0).queued_ns.load() == 0; });
    CHECK_EQ(hs_gate_bound_launches(20, 8 * kMillisecond), 0);
    CHECK_EQ(launches().waits, 0);
    CHECK(operate(200, 200 * kUs) <= 8 * kMillisecond);
    CHECK_EQ(hs_gate_bound_launches(20, 0), 0);
    CHECK(!fake.bounding.load());
    CHECK(operate(200, 200 * kUs) > 10 * kMillisecond);
    CHECK_EQ(hs_gate_launches(nullptr), -EINVAL);
}

/* A forked child has no device, no trace and an open gate: its first operator removes the callbacks that it has inherited. */
TEST(a_forked_child_removes_inherited_callbacks) {
    WithDevice with;
    start_usual();
    CHECK_EQ(hs_gate_bound_launches(20, kMillisecond), 0);
    operate(20, 200 * kUs);
    CHECK_EQ(hs_gate_trace_start(1, 0), 0);
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_API), 0);
    until_event(HS_EVENT_GATE_CLOSED, 1);
    const pid_t child = fork_child();
    if (child == 0) {
        fake_operator();
        _exit(fake.bounding.load() + 2 * fake.tracing.load() + 4 * fake.armed.load());
    }
    CHECK_EQ(exit_of(child), 0);
    CHECK_EQ(hs_gate_trace_stop(nullptr, 0), 0);
    hs_gate_stop();
}
