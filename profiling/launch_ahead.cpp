/* A training thread that launches kernels on the tests' fake device, bounded or not: `PROGRAM simulated`, once per line of
 * launch_ahead.py. Prints how long it took and what was queued at most. */
#include "fake_device.h"

static int64_t number(const char *name) { return strtoll(getenv(name), nullptr, 10); }

TEST(simulated) {
    alarm(0);
    WithDevice with;
    const int64_t bound_ns = number("BOUND_NS"), launch_ns = number("LAUNCH_NS"), steps = number("STEPS");
    const int64_t kernels_ns[] = {30 * kUs, 400 * kUs, 30 * kUs, 1500 * kUs, 80 * kUs, 200 * kUs}; /* norms, attention, a large product ... */
    const auto step = [&] {
        int64_t most_ns = 0;
        for (int i = 0; i < 4; ++i)
            for (const int64_t kernel_ns : kernels_ns) {
                const int64_t until_ns = hs::mono_ns() + launch_ns; /* what the program needs to get there */
                while (hs::mono_ns() < until_ns) {
                }
                most_ns = std::max(most_ns, operate(kernel_ns));
            }
        return most_ns;
    };
    CHECK_EQ(hs_gate_bound_launches(20, bound_ns), 0);
    for (int i = 0; i < 5; ++i) step(); /* it knows the kernels by then */
    until([&] { return with.device.stream(0).queued_ns.load() == 0; });
    const int64_t began_ns = hs::mono_ns();
    int64_t most_ns = 0;
    for (int64_t i = 0; i < steps; ++i) most_ns = std::max(most_ns, step());
    while (with.device.stream(0).queued_ns.load() > 0) usleep(20);
    printf("{\"took_ns\": %lld, \"most_queued_ns\": %lld}\n", static_cast<long long>(hs::mono_ns() - began_ns), static_cast<long long>(most_ns));
}
