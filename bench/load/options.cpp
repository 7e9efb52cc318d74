#include "options.hpp"

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <sstream>

#include "wire.hpp"

namespace {

constexpr const char* kUsage = R"(postbus-load: an AMQP 1.0 client that makes load and measures it

  postbus-load --mode send    --port 5672 --address q1 --count 100000 --window 100
  postbus-load --mode receive --port 5672 --address q1 --count 100000 --credit 500
  postbus-load --mode both    --port 5672 --address q1 --rate 20000 --count 1200000
  postbus-load --mode both    --port 5672 --address q1,q2,q3,q4 --shared-connections 2
  postbus-load --mode idle    --port 5672 --address q1 --connections 5000
  postbus-load --mode storm   --port 5672 --address q1 --connections 500

connection  --host --port --hostname --user --password --max-frame
            --transport tcp|tls|websocket|tls-websocket (certificates are not checked)
            PLAIN with a user (for Postbus: a rule's name and key), else ANONYMOUS
load        --address A[,B...]  --count N (of all connections)  --connections K (for each address)
            --shared-connections K (over which all links of a direction are spread)
            --window W  --size BYTES  --transient
messages    --sessions N (spread over N session ids)  --message-ids (a new one each)
            --property NAME=VALUE (digits are an integer; may be repeated)
            --schedule-s SECONDS  --ttl-s SECONDS (a millisecond more from message to message)
receiving   --credit C  --settle-range R  --settle second|first
            --outcome accept|reject
            --receive-address A (mode both: other than where it sends)
sessions    --accept-sessions LINKS (each takes the next session, drains it and lets it go)
            --hold-sessions (keeps it instead)
open loop   --rate PER_SECOND  --pace-us MICROSECONDS
ending      --limit-s SECONDS  --quiet-s SECONDS

The result is one JSON line on standard output. Exit code 0: all done; 1: unfinished, the
line names the missing part; 2: nothing could be started. idle prints a line when all
connections stand and ends when its standard input ends.
)";

[[noreturn]] void refuse(const std::string& reason) {
    std::fprintf(stderr, "postbus-load: %s (see --help)\n", reason.c_str());
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

Transport parse_transport(const std::string& text) {
    static const std::map<std::string, Transport> transports{
        {"tcp", Transport::kTcp},
        {"tls", Transport::kTls},
        {"websocket", Transport::kWebSocket},
        {"tls-websocket", Transport::kTlsWebSocket}};
    const auto found = transports.find(text);
    if (found == transports.end()) refuse("unknown transport: " + text);
    return found->second;
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');)
        if (!part.empty()) parts.push_back(part);
    return parts;
}

std::pair<std::string, std::string> parse_property(const std::string& text) {
    const std::size_t sign = text.find('=');
    if (sign == 0 || sign == std::string::npos || text.size() > 200)
        refuse("--property is NAME=VALUE of at most 200 bytes");
    return {text.substr(0, sign), text.substr(sign + 1)};
}

void validate(const Options& options) {
    if (options.addresses.empty()) refuse("--address is empty");
    if (options.body_bytes < 16) refuse("--size must be 16 or more: a body carries a time stamp");
    if (options.window == 0 || options.credit == 0 || options.connections == 0)
        refuse("--window, --credit and --connections must be 1 or more");
    if (options.max_frame_bytes < 512) refuse("--max-frame must be 512 or more");
    if (options.count == 0) refuse("--count must be 1 or more");
    if (options.sessions > 1'000'000) refuse("--sessions must be 1000000 or less");
    if (options.session_links > 1'000) refuse("--accept-sessions must be 1000 or less");
    const std::uint64_t links = options.addresses.size() * options.connections;
    const std::uint64_t most = std::uint64_t{options.shared} * (wire::kHandleMax + 1);
    if (options.shared != 0 && links > most)
        refuse("--shared-connections: a connection has room for 1024 links");
    const bool is_crowd = options.mode == Mode::kIdle || options.mode == Mode::kStorm;
    if (options.shared != 0 && (is_crowd || options.session_links != 0))
        refuse("--shared-connections is for send, receive and both, without --accept-sessions");
    if (options.session_links == 0) return;
    if (options.connections != 1 || options.addresses.size() != 1)
        refuse("--accept-sessions takes one address and one connection");
    if (options.body_bytes > options.max_frame_bytes / 2)
        refuse("--accept-sessions takes messages of one frame");
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
        {"--transport", [&](auto&, auto& text) { options.transport = parse_transport(text); }},
        {"--address", [&](auto&, auto& text) { options.addresses = split(text); }},
        {"--user", into(options.user)},
        {"--password", into(options.password)},
        {"--max-frame", into(options.max_frame_bytes)},
        {"--count", into(options.count)},
        {"--connections", into(options.connections)},
        {"--shared-connections", into(options.shared)},
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
        {"--sessions", into(options.sessions)},
        {"--property",
         [&](auto&, auto& text) { options.properties.push_back(parse_property(text)); }},
        {"--schedule-s", into(options.schedule_s)},
        {"--ttl-s", into(options.ttl_s)},
        {"--receive-address", into(options.receive_address)},
        {"--accept-sessions", into(options.session_links)},
        {"--rate", into(options.rate)},
        {"--pace-us", into(options.pace_us)},
        {"--limit-s", into(options.limit_s)},
        {"--quiet-s", into(options.quiet_s)},
    };
    const std::map<std::string, bool*> flags{{"--transient", &options.is_durable},
                                             {"--message-ids", &options.has_message_ids},
                                             {"--hold-sessions", &options.holds_sessions}};
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--help" || name == "-h") {
            std::fputs(kUsage, stdout);
            std::exit(0);
        }
        const auto flag = flags.find(name);
        if (flag != flags.end()) {
            *flag->second = name != "--transient";
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
