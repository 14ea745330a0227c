/* Who is held, who passes, and when that counts as parked. */
#include "harness.h"

/* Threads of autograd are held; a thread of neither autograd nor Python passes and is counted, gloo's among them. */
TEST(only_training_threads_are_held) {
    start_usual();
    Trainer autograd("pt_autograd_0"), gloo("pt_gloo_runloop"), other("worker");
    until([&] { return autograd.issued > 0 && gloo.issued > 0 && other.issued > 0; });
    pause_now();
    with_main_asleep([] { until_event(HS_EVENT_PARKED); });
    const int late = until_event(HS_EVENT_PARKED).quiet - 1; /* asleep between an operator and its count; not the main thread */
    const int64_t held_at = autograd.issued, gloo_at = gloo.issued, other_at = other.issued;
    until([&] { return gloo.issued > gloo_at + 100 && other.issued > other_at + 100; });
    CHECK(autograd.issued <= held_at + late);
    CHECK(status().passed > 200);
    resume_now();
    CHECK(until_event(HS_EVENT_RESUMED).passed > 200);
    until([&] { return autograd.issued > held_at; });
    hs_gate_stop();
}

/* A thread that issues nothing and sleeps counts as parked; one that computes does not, until it is held. */
TEST(asleep_is_quiet_and_busy_is_not) {
    start_usual();
    std::atomic<int> phase{0};
    std::thread controller([&] {
        pause_now();
        until_event(HS_EVENT_GATE_CLOSED);
        until([&] { return phase.load() == 1; }); /* the main thread spins for 30 ms */
        read_events();
        CHECK_EQ(count_of(HS_EVENT_PARKED), 0);
        const hs_event held = until_event(HS_EVENT_PARKED);
        CHECK_EQ(held.held, 1);
        CHECK_EQ(held.quiet, 0);
        resume_now();
        until([&] { return phase.load() == 2; });
        pause_now();
        const hs_event quiet = until_event(HS_EVENT_PARKED, 2);
        CHECK_EQ(quiet.held, 0);
        CHECK_EQ(quiet.quiet, 1);
        resume_now();
    });
    until([] { return status().closed_mono_ns != 0; });
    for (const int64_t end = hs::mono_ns() + 30 * hs::kMs; hs::mono_ns() < end;) {
    }
    phase.store(1);
    for (const int64_t end = hs::mono_ns() + 5 * hs::kMs; hs::mono_ns() < end;) {
    }
    fake_operator();
    phase.store(2);
    controller.join(); /* asleep in a futex */
    hs_gate_stop();
}

/* Pausing and resuming as fast as it goes against three training threads: all parked when it says so, none lost. */
TEST(park_and_open_races) {
    start_usual();
    {
        Trainer a("pt_autograd_0"), b("pt_autograd_1"), c("pt_autograd_2");
        for (int i = 1; i <= 100; ++i) {
            pause_now();
            with_main_asleep([i] { until_event(HS_EVENT_PARKED, i); });
            const int late = until_event(HS_EVENT_PARKED, i).quiet - 1; /* as above */
            const int64_t then = a.issued + b.issued + c.issued;
            std::this_thread::yield();
            CHECK(a.issued + b.issued + c.issued <= then + late);
            resume_now();
            until_event(HS_EVENT_RESUMED, i);
        }
        for (int i = 0; i < 2000; ++i) { /* without waiting for anything */
            pause_now();
            resume_now();
        }
        until([] { return status().closed_mono_ns == 0; });
        const int64_t at[] = {a.issued, b.issued, c.issued};
        until([&] { return a.issued > at[0] && b.issued > at[1] && c.issued > at[2]; });
    }
    hs_gate_stop();
    CHECK_EQ(status().held, 0);
    CHECK(!fake.armed.load());
}

/* Slots are used again, so that threads that come and go cost no memory for ever. */
TEST(slots_are_reused) {
    start_usual();
    for (int i = 1; i <= 40; ++i) {
        Trainer trainer("pt_autograd_0");
        pause_now();
        until_event(HS_EVENT_FIRST_OPERATOR_HELD, i);
        resume_now();
        until_event(HS_EVENT_RESUMED, i);
    }
    int slots = 0;
    for (hs::Slot *slot = hs::slots_first(); slot != nullptr; slot = slot->next) ++slots;
    CHECK(slots <= 2);
    hs_gate_stop();
}

/* A trace counts every operator of every thread, keeps the first, and holds nobody; with the gate closed as well. */
TEST(trace_counts) {
    CHECK_EQ(hs_gate_trace_start(3, 0), 0);
    CHECK_EQ(hs_gate_trace_start(3, 0), -EBUSY);
    for (int i = 0; i < 10; ++i) fake_operator(i == 0 ? "first" : "an operator with a name that is much longer than sixty-four bytes, cut");
    CHECK_EQ(hs_gate_trace_count(), 10);
    hs_traced kept[8];
    CHECK_EQ(hs_gate_trace_stop(kept, 8), 3);
    CHECK_EQ(strcmp(kept[0].text, "first"), 0);
    CHECK_EQ(static_cast<int>(strlen(kept[1].text)), HS_TEXT_BYTES - 1);
    CHECK_EQ(kept[0].tid, getpid());
    CHECK(kept[0].mono_ns > 0 && kept[0].mono_ns <= kept[1].mono_ns);
    CHECK_EQ(hs_gate_trace_count(), 10);
    CHECK_EQ(hs_gate_trace_stop(kept, 8), -EINVAL);
    CHECK_EQ(hs_gate_trace_start(3, 1), 0);
    for (const char *name : {"aten::mul", "c10d::allreduce_", "c10d::check_for_nan"}) fake_operator(name);
    CHECK_EQ(hs_gate_trace_count(), 1);
    CHECK_EQ(hs_gate_trace_stop(kept, 8), 1);
    CHECK_EQ(strcmp(kept[0].text, "c10d::allreduce_"), 0);
    Trainer one("worker"), two("worker");
    for (int i = 0; i < 20; ++i) {
        CHECK_EQ(hs_gate_trace_start(i, 0), 0);
        until([] { return hs_gate_trace_count() > 20; });
        CHECK(hs_gate_trace_stop(kept, 8) == (i < 8 ? i : 8));
    }
}
