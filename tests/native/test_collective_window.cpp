/* CollectiveWindows: a closed gate that lets the training threads go on to a collective. */
#include "harness.h"

/* A thread of autograd's that trains: three operators, one collective, and again. */
class Rank {
  public:
    Rank() : thread_([this] { train(); }) {}
    ~Rank() {
        end_.store(true);
        thread_.join();
    }
    std::atomic<int64_t> issued{0}, operators{0};
    std::atomic<bool> waits{false}; /* inside the next collective, until it is taken back */
    std::atomic<bool> waiting{false};

  private:
    void train() {
        prctl(PR_SET_NAME, "pt_autograd_0");
        while (!end_.load()) {
            for (int i = 0; i < 3; ++i) {
                fake_operator("aten::mm");
                operators.fetch_add(1);
            }
            fake_operator("c10d::allreduce_");
            issued.fetch_add(1);
            while (waits.load()) {
                waiting.store(true);
                const timespec moment = {0, 500'000'000};
                nanosleep(&moment, nullptr);
            }
            waiting.store(false);
        }
    }
    std::atomic<bool> end_{false};
    std::thread thread_;
};

/* A gate with a rank that has trained for a while. */
static void with_rank(const std::function<void(Rank &)> &body) {
    start_usual();
    Rank rank;
    until([&] { return rank.issued > 10; });
    with_main_asleep([&] { body(rank); });
    hs_gate_stop();
}

/* The same, paused and parked before the body, and resumed behind it. */
static void with_parked_rank(const std::function<void(Rank &)> &body) {
    with_rank([&](Rank &rank) {
        pause_now();
        until_event(HS_EVENT_PARKED);
        body(rank);
        resume_now();
    });
}

/* After let_through(n) exactly n more collectives have been issued, and the thread stands before the next one. Several
 * add up; n = 0, and any n while the gate is open, change nothing. */
TEST(let_through_counts) {
    with_rank([&](Rank &rank) {
        int parked = 0;
        for (const int n : {1, 3, 1, 17}) {
            CHECK_EQ(hs_gate_let_through(4), 0);
            /* before the pause: a turn of the watcher that has begun leaves the call to the next one */
            until([] { return hs::gate.window.calls.load() == hs::gate.window.taken.load(); });
            pause_now(HS_CAUSE_PEERS);
            until_event(HS_EVENT_PARKED, ++parked);
            const int64_t then = rank.issued.load(), operators = rank.operators.load();
            CHECK_EQ(hs_gate_let_through(0), 0);
            CHECK_EQ(status().state, HS_STATE_PARKED);
            CHECK_EQ(rank.operators.load(), operators);
            CHECK_EQ(hs_gate_let_through(n), 0);
            const bool as_before = status().state == HS_STATE_PARKED;
            CHECK(!as_before || rank.issued.load() == then + n); /* never PARKED and not gone on yet */
            const hs_event arrived = until_event(HS_EVENT_PARKED, ++parked);
            CHECK_EQ(rank.issued.load(), then + n);
            CHECK_EQ(arrived.count, n);
            CHECK_EQ(arrived.held, 1);
            CHECK_EQ(strcmp(arrived.text, "c10d::allreduce_"), 0);
            const hs_event &through = seen()[seen().size() - 2]; /* told between two PARKED of the same request */
            CHECK(through.kind != HS_EVENT_LET_THROUGH || (through.count == n && through.mono_ns < arrived.mono_ns));
            CHECK(count_of(HS_EVENT_LET_THROUGH) > 0);
            CHECK_EQ(status().state, HS_STATE_PARKED);
            CHECK_EQ(status().window_open, 1);
            CHECK_EQ(status().allowance, 0);
            CHECK_EQ(status().let_through, n);
            CHECK_EQ(hs_gate_let_through(1), 0);
            CHECK_EQ(hs_gate_let_through(1), 0);
            until([&] { return rank.issued == then + n + 2 && status().state == HS_STATE_PARKED; });
            read_events();
            parked = count_of(HS_EVENT_PARKED);
            resume_now(HS_CAUSE_PEERS);
            until([&] { return rank.issued > then + n + 2; });
            until([] { return status().closed_mono_ns == 0; });
            CHECK_EQ(status().window_open, 0);
        }
    });
}

/* What is left is lost when the gate opens, also by a stop, and a new closing holds at any operator again. */
TEST(let_through_ends_with_the_closing) {
    with_rank([&](Rank &rank) {
        pause_now();
        until_event(HS_EVENT_PARKED);
        rank.waits.store(true); /* so that the allowance cannot be used up */
        CHECK_EQ(hs_gate_let_through(1000), 0);
        until([&] { return rank.waiting.load(); });
        CHECK(status().allowance > 0);
        resume_now();
        until_event(HS_EVENT_RESUMED);
        CHECK_EQ(status().allowance, 0);
        rank.waits.store(false);
        const int64_t issued = rank.issued.load();
        until([&] { return rank.issued > issued + 10; });
        read_events();
        const int parked = count_of(HS_EVENT_PARKED);
        pause_now();
        until_event(HS_EVENT_PARKED, parked + 1);
        CHECK_EQ(status().allowance, 0);
        CHECK_EQ(status().window_open, 0);
        CHECK_EQ(hs_gate_let_through(2), 0);
        until_event(HS_EVENT_PARKED, parked + 2);
        CHECK_EQ(hs_gate_request(HS_ACTION_STOP, 0), 0);
        const int64_t then = rank.issued.load();
        until([&] { return rank.issued > then + 10 && status().state == HS_STATE_STOPPING; });
        CHECK_EQ(hs_gate_let_through(1), 0);
        CHECK_EQ(status().state, HS_STATE_STOPPING);
        CHECK_EQ(status().window_open, 0);
    });
}

/* A thread that waits inside a collective is quiet, and parked. When it goes on that is taken back, and it parks again before
 * the first collective that is not allowed for. */
TEST(quiet_thread_goes_on_to_its_collective) {
    with_parked_rank([&](Rank &rank) {
        rank.waits.store(true);
        const int64_t then = rank.issued.load();
        CHECK_EQ(hs_gate_let_through(3), 0);
        until([&] { return rank.waiting.load() && status().state == HS_STATE_PARKED; });
        CHECK_EQ(status().quiet, 2); /* and the main thread */
        CHECK_EQ(rank.issued.load(), then + 1);
        CHECK_EQ(status().allowance, 2);
        CHECK_EQ(hs_gate_let_through(2), 0); /* adds up */
        until([] { return status().allowance == 4; });
        rank.waits.store(false);
        until([&] { return rank.issued == then + 5 && status().state == HS_STATE_PARKED && status().held == 1; });
        read_events();
        CHECK_EQ(seen().back().kind, HS_EVENT_PARKED);
        CHECK_EQ(seen().back().count, 5);
        CHECK_EQ(seen().back().held, 1);
    });
}

/* hold_here closes a window: the thread is held at its next operator of any kind, and the allowance is gone. */
TEST(hold_here_closes_a_window) {
    with_rank([&](Rank &rank) {
        CHECK_EQ(hs_gate_hold_here(), 0); /* open: nothing to end */
        pause_now();
        until_event(HS_EVENT_PARKED);
        CHECK_EQ(hs_gate_hold_here(), 0); /* no window: nothing to close */
        CHECK_EQ(hs_gate_let_through(1'000'000'000), 0);
        until_event(HS_EVENT_LET_THROUGH);
        CHECK_EQ(hs_gate_hold_here(), 0);
        const hs_event ended = until_event(HS_EVENT_LET_THROUGH, 2);
        CHECK_EQ(ended.count, 0);
        CHECK(ended.value_ns > 0);
        until([] { return status().state == HS_STATE_PARKED; });
        CHECK_EQ(status().window_open, 0);
        const int64_t then = rank.operators.load(), issued = rank.issued.load();
        CHECK_EQ(hs_gate_let_through(2), 0); /* and again from here */
        until([&] { return rank.issued == issued + 2 && status().state == HS_STATE_PARKED; });
        CHECK(rank.operators.load() > then);
        resume_now();
    });
}

/* Two threads share one allowance, and what exempt threads and backends issue is not counted. */
TEST(threads_share_the_allowance) {
    start_usual();
    Rank a, b;
    std::atomic<bool> end{false};
    std::thread saver([&] {
        hs_gate_exempt(1);
        while (!end.load()) {
            fake_operator("c10d::barrier");
            const timespec moment = {0, 1'000'000};
            nanosleep(&moment, nullptr);
        }
    });
    until([&] { return a.issued > 10 && b.issued > 10; });
    with_main_asleep([&] {
        pause_now();
        until_event(HS_EVENT_PARKED);
        const int64_t then = a.issued + b.issued;
        CHECK_EQ(hs_gate_let_through(9), 0);
        until([&] { return a.issued + b.issued == then + 9 && status().state == HS_STATE_PARKED; });
        CHECK_EQ(status().held, 2);
        until([] { return status().passed > 0; }); /* the saver sleeps in between */
        resume_now();
    });
    end.store(true);
    saver.join();
    hs_gate_stop();
}

/* Only torch's collectives are counted: not what wraps them, not their nodes in the graph, not a look for NaN. */
TEST(names_that_are_collectives) {
    start_usual();
    std::atomic<bool> end{false};
    std::thread controller([&] {
        pause_now();
        until_event(HS_EVENT_PARKED);
        CHECK_EQ(hs_gate_let_through(2), 0);
        until([] { return status().let_through == 2 && status().state == HS_STATE_PARKED && status().held == 1; });
        until([] { /* the event follows the state */
            read_events();
            return strcmp(seen().back().text, "c10d::send") == 0;
        });
        end.store(true);
        resume_now();
    });
    until([] { return status().closed_mono_ns != 0; });
    for (const char *name : {"aten::mm", "_c10d_functional::all_reduce", "c10d::allreduce_", "c10d::check_for_nan",
                             "_c10d_functional::wait_tensor", "c10d_functional::broadcast", "c10d:", "", "record_param_comms",
                             "c10d::recv_any_source_", "c10d::send"})
        fake_operator(name);
    CHECK(end.load());
    controller.join();
    hs_gate_stop();
}

/* Closing, letting through and opening as fast as it goes: nobody is lost, and nothing passes uncounted. */
TEST(window_races) {
    start_usual();
    {
        Rank rank;
        until([&] { return rank.issued > 10; });
        with_main_asleep([&] {
            uint64_t random = 4711;
            for (int i = 0; i < 2000; ++i) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                pause_now();
                if (random >> 33 & 1) hs_gate_let_through(static_cast<int64_t>(random >> 40 & 3));
                if (random >> 34 & 1) hs_gate_hold_here();
                if (random >> 35 & 1) until([] { return status().state != HS_STATE_RUNNING; });
                if (i % 50 == 0) {
                    hs_gate_hold_here();
                    until([] { return status().state == HS_STATE_PARKED && !hs::gate.window.ended.load() && status().allowance == 0; });
                    const int64_t then = rank.issued.load();
                    CHECK_EQ(hs_gate_let_through(2), 0);
                    until([&] { return status().let_through >= 2 && status().state == HS_STATE_PARKED; });
                    until([&] { return rank.issued.load() == then + 2; });
                }
                resume_now();
                read_events();
            }
            until([] { return status().closed_mono_ns == 0; });
        });
        const int64_t then = rank.issued.load();
        until([&] { return rank.issued > then + 10; });
    }
    hs_gate_stop();
    CHECK(!fake.armed.load());
}

/* A child forked from a window has an open gate and no allowance, takes the callback away, and does not act on signals. */
TEST(fork_in_a_window) {
    start_usual();
    std::thread controller([&] {
        pause_now();
        until_event(HS_EVENT_PARKED);
        CHECK_EQ(hs_gate_let_through(1), 0);
    });
    until([] { return status().closed_mono_ns != 0; });
    fake_operator("aten::mm"); /* held until it is let through */
    controller.join();
    const pid_t child = fork_child();
    if (child == 0) {
        raise(SIGUSR1);
        CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_API), -ESRCH);
        CHECK(fake.armed.load());
        for (int i = 0; i < 5; ++i) fake_operator("c10d::allreduce_");
        CHECK(!fake.armed.load());
        const hs_status now = status();
        _exit(now.window_open == 0 && now.allowance == 0 && now.state == HS_STATE_RUNNING && now.causes == 0 ? 0 : 1);
    }
    CHECK_EQ(exit_of(child), 0);
    CHECK(fake.armed.load());
    resume_now();
    hs_gate_stop();
}
