#include "options.hpp"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

namespace {

constexpr const char* kUsage = R"(postbus-load: an AMQP 1.0 client that makes load and measures it

  postbus-load --mode send    --port 5672 --address q1 --count 100000 --window 100
  postbus-load --mode receive --port 5672 --address q1 --count 100000 --credit 500
  postbus-load --mode both    --port 5672 --address q1 --rate 20000 --count 1200000
  postbus-load --mode idle    --port 5672 --address q1 --connections 5000
  postbus-load --mode storm   --port 5672 --address q1 --connections 500

connection  --host --port --hostname --user --password --max-frame
            PLAIN with a user (for Postbus: a rule's name and key), else ANONYMOUS
load        --address A[,B...]  --count N (of all connections)  --connections K (for each address)
            --window W  --size BYTES  --transient
receiving   --credit C  --settle-range R  --settle second|first
            --outcome accept|reject
open loop   --rate PER_SECOND  --pace-us MICROSECONDS
ending      --limit-s SECONDS  --quiet-s SECONDS

The result is one JSON line on standard output. Exit code 0: all done; 1: unfinished, the
line says what is missing; 2: nothing could be started. idle prints a line when all
connections stand and ends when its standard input ends.
)";

[[noreturn]] void refuse(const std::string& reason) {
    std::fprintf(stderr, "postbus-load: %s (--help tells more)\n", reason.c_str());
    std::exit(2);
}

double number(const std::string& name, const std::string& text) {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= 0)) refuse(name + ": not a number: " + text);
    return value;
}

template <typename T>
std::function<void(const std::string&, const std::string&)> into(T& target) {
    return [&target](const std::string& name, const std::string& text) {
        target = static_cast<T>(number(name, text));
    };
}

std::function<void(const std::string&, const std::string&)> into(std::string& target) {
    return [&target](const std::string&, const std::string& text) { target = text; };
}

Mode parse_mode(const std::string& text) {
    static const std::map<std::string, Mode> modes{{"send", Mode::kSend},
                                                   {"receive", Mode::kReceive},
                                                   {"both", Mode::kBoth},
                                                   {"idle", Mode::kIdle},
                                                   {"storm", Mode::kStorm}};
    const auto found = modes.find(text);
    if (found == modes.end()) refuse("unknown mode: " + text);
    return found->second;
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');)
        if (!part.empty()) parts.push_back(part);
    return parts;
}

void validate(const Options& options) {
    if (options.addresses.empty()) refuse("--address is empty");
    if (options.body_bytes < 16) refuse("--size must be 16 or more: a body carries a time stamp");
    if (options.window == 0 || options.credit == 0 || options.connections == 0)
        refuse("--window, --credit and --connections must be 1 or more");
    if (options.max_frame_bytes < 512) refuse("--max-frame must be 512 or more");
    if (options.count == 0) refuse("--count must be 1 or more");
}

}  // namespace

Options parse_options(int argc, char** argv) {
    Options options;
    using Setter = std::function<void(const std::string&, const std::string&)>;
    const std::map<std::string, Setter> setters{
        {"--mode", [&](auto&, auto& text) { options.mode = parse_mode(text); }},
        {"--host", into(options.host)},
        {"--hostname", into(options.hostname)},
        {"--port", into(options.port)},
        {"--address", [&](auto&, auto& text) { options.addresses = split(text); }},
        {"--user", into(options.user)},
        {"--password", into(options.password)},
        {"--max-frame", into(options.max_frame_bytes)},
        {"--count", into(options.count)},
        {"--connections", into(options.connections)},
        {"--window", into(options.window)},
        {"--size", into(options.body_bytes)},
        {"--credit", into(options.credit)},
        {"--settle-range", into(options.settle_range)},
        {"--settle",
         [&](auto&, auto& text) {
             if (text != "second" && text != "first") refuse("--settle is second or first");
             options.confirms_settlement = text == "second";
         }},
        {"--outcome",
         [&](auto&, auto& text) {
             if (text != "accept" && text != "reject") refuse("--outcome is accept or reject");
             options.rejects = text == "reject";
         }},
        {"--rate", into(options.rate)},
        {"--pace-us", into(options.pace_us)},
        {"--limit-s", into(options.limit_s)},
        {"--quiet-s", into(options.quiet_s)},
    };
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            std::fputs(kUsage, stdout);
            std::exit(0);
        }
        if (name == "--transient") {
            options.is_durable = false;
            continue;
        }
        const auto setter = setters.find(name);
        if (setter == setters.end()) refuse("unknown option: " + name);
        if (++i == argc) refuse(name + " needs a value");
        setter->second(name, argv[i]);
    }
    validate(options);
    return options;
}
