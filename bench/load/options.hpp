// Options of one run of the load client, from the command line.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

enum class Mode { kSend, kReceive, kBoth, kIdle, kStorm };

enum class Transport { kTcp, kTls, kWebSocket, kTlsWebSocket };

struct Options {
    Mode mode = Mode::kSend;
    std::string host = "127.0.0.1";
    std::string hostname = "localhost";  // what the open performative names
    std::uint16_t port = 5672;
    Transport transport = Transport::kTcp;
    std::vector<std::string> addresses{"q1"};
    std::string user;  // empty: SASL ANONYMOUS
    std::string password;
    std::uint32_t max_frame_bytes = 65536;

    std::uint64_t count = 100000;    // messages, over all connections
    std::uint32_t connections = 1;   // for each address and direction; total for idle and storm
    std::uint32_t shared = 0;        // connections that links of a direction share; 0: one for each
    std::uint32_t window = 100;      // unacknowledged messages of one sender
    std::uint32_t body_bytes = 1024;
    std::uint32_t credit = 500;      // of one receiver, topped up as completions are done
    std::uint32_t settle_range = 1;  // messages for one disposition, at most
    bool confirms_settlement = true; // rcv-settle-mode second: wait for the broker's disposition
    bool rejects = false;            // reject instead of complete: Service Bus dead-letters then
    bool is_durable = true;

    std::uint32_t sessions = 0;      // messages are spread over so many session ids; 0: none
    bool has_message_ids = false;    // each message gets an id that no other has
    std::vector<std::pair<std::string, std::string>> properties;  // application properties
    double schedule_s = 0;  // message n becomes active so long and n ms after the start; 0: at once
    double ttl_s = 0;       // message n lives so long and n ms; 0: without an end

    std::string receive_address;         // mode both: where it receives, if not where it sends
    std::uint32_t session_links = 0;     // receive by session over so many links; 0: no sessions
    bool holds_sessions = false;         // keep a session to the end, do not drain and release it
    double rate = 0;                 // messages a second, open loop; 0: as fast as the window allows
    double pace_us = 100;            // open loop: how often due messages are looked for

    double limit_s = 600;  // end an unfinished run after this time
    double quiet_s = 10;   // ... or when nothing happened for so long
};

// Prints the reason and exits with 2 when the arguments make no sense.
Options parse_options(int argc, char** argv);
