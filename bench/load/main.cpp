#include <csignal>

#include "crowd.hpp"
#include "options.hpp"
#include "traffic.hpp"

int main(int argc, char** argv) {
    std::signal(SIGPIPE, SIG_IGN);
    const Options options = parse_options(argc, argv);
    switch (options.mode) {
        case Mode::kIdle: return run_idle(options);
        case Mode::kStorm: return run_storm(options);
        default: return run_traffic(options);
    }
}
