/* Arguments, latches, causes. */
#include "harness.h"

/* Every wrong argument is refused with the errno that gate.h names, and leaves nothing behind. */
TEST(bad_arguments) {
    CHECK_EQ(hs_gate_start(nullptr, 1, -1), -EINVAL);
    CHECK_EQ(hs_gate_start(nullptr, -1, -1), -EINVAL);
    const std::vector<hs_signal> bad = {
        line(SIGUSR1, 0, HS_CAUSE_USER),  line(SIGUSR1, 4, HS_CAUSE_USER), line(SIGKILL, HS_ACTION_PAUSE, HS_CAUSE_USER),
        line(SIGSTOP, HS_ACTION_PAUSE, HS_CAUSE_USER), line(0, HS_ACTION_PAUSE, HS_CAUSE_USER), line(65, HS_ACTION_PAUSE, HS_CAUSE_USER),
        line(SIGUSR1, HS_ACTION_PAUSE, 0), line(SIGUSR1, HS_ACTION_RESUME, 64), line(-1, HS_ACTION_STOP, 0)};
    for (const hs_signal &one : bad) {
        std::vector<hs_signal> table = {line(SIGUSR2, HS_ACTION_RESUME, HS_CAUSE_USER), one};
        CHECK_EQ(start(table), -EINVAL);
        CHECK_EQ(table[0].result, 0);
        CHECK_EQ(table[1].result, -EINVAL);
    }
    std::vector<hs_signal> twice = {line(SIGUSR1, HS_ACTION_PAUSE, HS_CAUSE_USER), line(SIGUSR1, HS_ACTION_RESUME, HS_CAUSE_USER)};
    CHECK_EQ(start(twice), -EINVAL);
    CHECK_EQ(twice[1].result, -EINVAL);
    std::vector<hs_signal> fails = {line(SIGUSR2, HS_ACTION_PAUSE, HS_CAUSE_USER), line(32, HS_ACTION_PAUSE, HS_CAUSE_USER)};
    CHECK_EQ(start(fails), -EINVAL); /* 32 is glibc's own: sigaction refuses it when the first has its handler */
    CHECK_EQ(fails[1].result, -EINVAL);
    std::vector<hs_signal> many(33, line(SIGUSR1, HS_ACTION_PAUSE, HS_CAUSE_USER));
    CHECK_EQ(start(many), -EINVAL);

    struct sigaction now;
    sigaction(SIGUSR2, nullptr, &now);
    CHECK(now.sa_handler == SIG_DFL);
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_API), -ESRCH);
    CHECK_EQ(hs_gate_let_through(-1), -EINVAL);
    CHECK_EQ(hs_gate_let_through(1), -ESRCH);
    CHECK_EQ(hs_gate_let_through(0), -ESRCH);
    CHECK_EQ(hs_gate_hold_here(), -ESRCH);
    CHECK_EQ(hs_gate_status(nullptr), -EINVAL);
    CHECK_EQ(hs_gate_read(nullptr, 1), -EINVAL);
    CHECK_EQ(hs_gate_read(nullptr, -1), -EINVAL);
    CHECK_EQ(hs_gate_read(nullptr, 0), 0);
    CHECK_EQ(hs_gate_stop(), 0);
    CHECK_EQ(hs_gate_check_handlers(), 0);
    CHECK_EQ(hs_gate_trace_start(-1, 0), -EINVAL);
    CHECK_EQ(hs_gate_trace_start(2'000'000'000, 0), -EINVAL);
    CHECK_EQ(hs_gate_trace_stop(nullptr, 0), -EINVAL);
    CHECK_EQ(hs_gate_abi(), HS_GATE_ABI);

    start_usual(); /* and while it runs, too */
    CHECK_EQ(start(twice), -EALREADY);
    CHECK_EQ(hs_gate_request(0, HS_CAUSE_API), -EINVAL);
    CHECK_EQ(hs_gate_request(4, HS_CAUSE_API), -EINVAL);
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, 0), -EINVAL);
    CHECK_EQ(hs_gate_request(HS_ACTION_RESUME, 64), -EINVAL);
    CHECK_EQ(hs_gate_let_through(-1), -EINVAL);
    CHECK_EQ(hs_gate_let_through(int64_t{INT32_MAX} + 1), -EINVAL);
    CHECK_EQ(hs_gate_let_through(0), 0);
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_TERMINAL), -EINVAL);
    CHECK_EQ(hs_gate_request(HS_ACTION_RESUME, HS_CAUSE_TERMINAL), 0);
    CHECK_EQ(hs_gate_stop(), 0);
}

/* 10,000 signals in any order end in the state that the last pause and the last resume of each cause ask for. */
TEST(latch_orders) {
    start_usual();
    const int signals[] = {SIGUSR1, SIGUSR2, SIGTSTP, SIGCONT};
    unsigned random = 12345;
    for (int round = 0; round < 20; ++round) {
        uint32_t wanted = 0;
        for (int i = 0; i < 500; ++i) {
            random = random * 1103515245u + 12345u;
            const int which = static_cast<int>(random >> 16) % 4;
            raise(signals[which]); /* its handler has run when this returns */
            const uint32_t bit = which < 2 ? HS_CAUSE_USER : HS_CAUSE_SLURM;
            wanted = which % 2 == 0 ? wanted | bit : wanted & ~bit;
            if (i % 50 == 0) read_events();
        }
        until([&] {
            const hs_status now = status();
            return now.causes == wanted && (now.closed_mono_ns != 0) == (wanted != 0);
        });
    }
    hs_gate_stop();
    read_events();
    int64_t received = 0;
    for (const hs_event &event : seen())
        if (event.kind == HS_EVENT_SIGNAL_RECEIVED) received += event.count;
    CHECK_EQ(received, 10'000);
    CHECK_EQ(count_of(HS_EVENT_EVENTS_DROPPED), 0);
    CHECK(!fake.armed.load());
}

/* Signals sent by several threads at once lose none of the last ones. */
TEST(signals_from_many_threads) {
    start_usual();
    std::vector<std::thread> senders;
    for (int t = 0; t < 4; ++t)
        senders.emplace_back([t] {
            for (int i = 0; i < 1000; ++i) kill(getpid(), (i + t) % 2 ? SIGUSR1 : SIGUSR2);
        });
    for (std::thread &sender : senders) sender.join();
    int looks = 0;
    until([&] { return ++looks == 5; }); /* ThreadSanitizer puts signals off until the thread sleeps */
    raise(SIGUSR2);
    until([] { return status().causes == 0 && status().closed_mono_ns == 0; });
    raise(SIGUSR1);
    until([] { return status().causes == HS_CAUSE_USER && status().closed_mono_ns != 0; });
    hs_gate_stop();
}

/* A reader that never comes costs the newest events, which are counted. */
TEST(full_queue_counts_what_it_drops) {
    start_usual();
    signal(SIGUSR1, SIG_IGN); /* replaced: one event per check */
    for (int i = 0; i < 3000; ++i) CHECK_EQ(hs_gate_check_handlers(), 1);
    read_events();
    CHECK_EQ(static_cast<int64_t>(seen().size()), 2049);
    CHECK_EQ(seen().back().kind, HS_EVENT_EVENTS_DROPPED);
    CHECK_EQ(seen().back().count, 3000 - 2048);
    CHECK_EQ(hs_gate_stop(), 1);
}

/* A stop opens the gate and keeps it open; only a new start obeys a pause again. */
TEST(stop_wins) {
    start_usual();
    raise(SIGUSR1);
    until_event(HS_EVENT_GATE_CLOSED);
    raise(SIGTERM);
    const hs_event &stop = until_event(HS_EVENT_STOP_REQUESTED);
    CHECK_EQ(stop.signo, SIGTERM);
    until_event(HS_EVENT_RESUMED);
    until([] { return status().state == HS_STATE_STOPPING; });
    raise(SIGTSTP);
    until([] { return status().causes == (HS_CAUSE_USER | HS_CAUSE_SLURM); });
    CHECK_EQ(status().closed_mono_ns, 0);
    raise(SIGUSR2);
    raise(SIGCONT);
    until([] { return status().causes == 0; });
    CHECK_EQ(status().state, HS_STATE_STOPPING);
    hs_gate_stop();
    start_usual();
    raise(SIGUSR1);
    until_event(HS_EVENT_GATE_CLOSED, 2);
    hs_gate_stop();
}

/* After a stop nobody holds the gate closed and nobody can close it, however requests and the stop cross. */
TEST(stopped_while_closing) {
    Trainer trainer("pt_autograd_0");
    for (int round = 0; round < 100; ++round) {
        start_usual();
        std::atomic<bool> end{false};
        auto ask = [&end](uint32_t cause) {
            while (!end.load()) {
                hs_gate_request(HS_ACTION_PAUSE, cause);
                hs_gate_request(HS_ACTION_RESUME, cause);
            }
            hs_gate_request(HS_ACTION_PAUSE, cause);
        };
        std::thread one(ask, HS_CAUSE_API), two(ask, HS_CAUSE_PEERS);
        raise(SIGUSR1);
        if (round % 2 == 0) raise(SIGUSR2);
        end.store(true);
        hs_gate_stop();
        one.join();
        two.join();
        CHECK_EQ(hs::gate.closed.load(), 0);
        CHECK(!fake.armed.load());
        read_events();
        const int64_t issued = trainer.issued.load();
        until([&] { return trainer.issued.load() > issued; });
    }
}

/* A gate that is closed for a vacated device opens for no stop and no resume before that is over, and one that is open
 * does not close for it once a stop has come. */
TEST(stop_waits_for_vacated) {
    start_usual();
    raise(SIGUSR1);
    until_event(HS_EVENT_GATE_CLOSED);
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_VACATED), 0);
    until([] { return status().causes == (HS_CAUSE_USER | HS_CAUSE_VACATED); });
    raise(SIGUSR2);
    until([] { return status().causes == HS_CAUSE_VACATED; });
    CHECK(status().closed_mono_ns != 0);
    raise(SIGTERM);
    until_event(HS_EVENT_STOP_REQUESTED);
    raise(SIGUSR2);
    until([] { return status().causes == HS_CAUSE_VACATED; });
    CHECK(status().closed_mono_ns != 0);
    CHECK_EQ(count_of(HS_EVENT_RESUMED), 0);
    CHECK_EQ(hs_gate_request(HS_ACTION_RESUME, HS_CAUSE_VACATED), 0);
    until_event(HS_EVENT_RESUMED);
    until([] { return status().state == HS_STATE_STOPPING; });
    CHECK_EQ(hs_gate_request(HS_ACTION_PAUSE, HS_CAUSE_VACATED), 0);
    until([] { return status().causes == HS_CAUSE_VACATED; });
    CHECK_EQ(status().closed_mono_ns, 0);
    fake_operator();
    hs_gate_stop();
}

/* What torch refuses is told, and tried again. */
TEST(refused_callback) {
    fake.hold_error.store(-ENOMEM);
    start_usual();
    raise(SIGUSR1);
    const hs_event &refused = until_event(HS_EVENT_CAUSES_CHANGED);
    CHECK_EQ(refused.count, ENOMEM);
    CHECK(refused.text[0] != '\0');
    CHECK_EQ(status().closed_mono_ns, 0);
    fake_operator(); /* nobody is held by a gate that could not be closed */
    fake.hold_error.store(0);
    until_event(HS_EVENT_GATE_CLOSED);
    CHECK_EQ(count_of(HS_EVENT_CAUSES_CHANGED), 1);
    hs_gate_stop();
}
