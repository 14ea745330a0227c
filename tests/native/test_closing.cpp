/* Who closes and who arms: a request closes the gate by itself, and the next operator arms it, or else the watcher. */
#include "harness.h"

#include <pthread.h>

namespace {

/* Nobody can arm or disarm while one of these lives. */
struct NobodyArms {
    NobodyArms() { pthread_mutex_lock(&hs::gate.arming); }
    ~NobodyArms() { pthread_mutex_unlock(&hs::gate.arming); }
};

/* A request that comes before the watcher runs is left to it. */
void start_and_wait() {
    start_usual();
    until([] { return hs::gate.may_close.load(); });
}

void check_open() {
    CHECK_EQ(hs::gate.closed.load(), 0);
    CHECK(!fake.armed.load());
}

} // namespace

/* The gate is closed when the handler returns; operators are diverted until one of them has armed it. None waits for that. */
TEST(handler_closes) {
    start_and_wait();
    {
        const NobodyArms nobody;
        raise(SIGUSR1);
        CHECK(hs::gate.closed.load() != 0);
        CHECK(fake.diverted.load());
        fake_operator();
        CHECK_EQ(fake.operators.load(), 1);
    }
    until_event(HS_EVENT_GATE_CLOSED);
    CHECK(fake.armed.load() && !fake.diverted.load());
    raise(SIGUSR2);
    until_event(HS_EVENT_RESUMED);
    check_open();
    hs_gate_stop();
}

/* An operator that finds the gate closed arms it and is held; the watcher reports who it was. */
TEST(operator_arms) {
    start_and_wait();
    std::atomic<pid_t> tid{0};
    std::atomic<bool> end{false};
    std::thread trainer;
    {
        const NobodyArms nobody; /* the watcher waits here, and finds it done */
        raise(SIGUSR1);
        trainer = std::thread([&] {
            tid.store(hs::thread_id());
            pthread_setname_np(pthread_self(), "pt_autograd_0");
            while (!end.load()) fake_operator();
        });
        until([&] { return tid.load() != 0; });
    }
    const hs_event closed = until_event(HS_EVENT_GATE_CLOSED);
    const hs_event held = until_event(HS_EVENT_FIRST_OPERATOR_HELD);
    CHECK(closed.tid != 0);
    CHECK_EQ(held.tid, tid.load());
    CHECK(held.mono_ns >= closed.mono_ns && closed.mono_ns > closed.value_ns);
    CHECK_EQ(fake.holds_on.load(), 1);
    end.store(true);
    raise(SIGUSR2);
    trainer.join();
    hs_gate_stop();
}

/* Where operators cannot be diverted, the watcher arms. */
TEST(watcher_arms) {
    fake.refuses_to_divert.store(true);
    start_usual();
    raise(SIGUSR1);
    const hs_event &closed = until_event(HS_EVENT_GATE_CLOSED);
    CHECK_EQ(closed.tid, hs::gate.armed_by.load());
    CHECK(closed.tid != hs::thread_id());
    hs_gate_stop();
}

/* A pause that is taken back before anybody has armed is reported with both of its requests. */
TEST(opened_before_it_was_armed) {
    start_and_wait();
    {
        const NobodyArms nobody;
        raise(SIGUSR1);
        raise(SIGUSR2);
        CHECK_EQ(hs::gate.closed.load(), 0);
    }
    const hs_event closed = until_event(HS_EVENT_GATE_CLOSED);
    const hs_event resumed = until_event(HS_EVENT_RESUMED);
    CHECK_EQ(closed.causes, HS_CAUSE_USER);
    CHECK(closed.value_ns < resumed.value_ns && closed.mono_ns <= resumed.mono_ns);
    fake_operator(); /* a diversion that was left behind ends here */
    CHECK(!fake.diverted.load());
    check_open();
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
        check_open();
        CHECK(!hs::gate.may_close.load());
        read_events();
        const int64_t issued = trainer.issued.load();
        until([&] { return trainer.issued.load() > issued; });
    }
}

/* A signal of somebody else's, sent to the process while every thread but the watcher blocks it, arrives when it is let in: the
 * watcher waits for a signal of its own, and sigtimedwait() takes whatever of that number comes to the process. SIGURG was it
 * once, which Slurm may send as a warning. */
TEST(warning_survives_the_watcher) {
    static std::atomic<int> heard{0};
    struct sigaction action = {};
    action.sa_handler = [](int) { heard.fetch_add(1); };
    sigaction(SIGURG, &action, nullptr);
    sigset_t urg;
    sigemptyset(&urg);
    sigaddset(&urg, SIGURG);
    pthread_sigmask(SIG_BLOCK, &urg, nullptr);
    start_and_wait();
    kill(getpid(), SIGURG);
    pause_now(); /* so that the watcher has been round once */
    until_event(HS_EVENT_GATE_CLOSED);
    CHECK_EQ(heard.load(), 0);
    pthread_sigmask(SIG_UNBLOCK, &urg, nullptr);
    CHECK_EQ(heard.load(), 1);
    hs_gate_stop();
}
