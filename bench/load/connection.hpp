// One AMQP connection with one session on it, over a non-blocking socket.
//
// The hand-shake goes step by step, as client libraries do it: SASL, open, then begin together
// with what the SessionHandler attaches. Links are the handler's: it gets all their frames.
#pragma once

#include <cstdint>
#include <string>

#include "options.hpp"
#include "stream.hpp"
#include "wire.hpp"

// The distance of two serial numbers, which wrap.
inline std::uint32_t serial_room(std::uint32_t limit, std::uint32_t used) {
    const auto room = static_cast<std::int32_t>(limit - used);
    return room < 0 ? 0 : static_cast<std::uint32_t>(room);
}

struct LinkSpec {
    std::string name;
    std::string address;
    bool is_sender = true;
};

// Fields are those of the frames; handles in them are the broker's.
class SessionHandler {
  public:
    virtual ~SessionHandler() = default;
    // The broker has opened, the session is asked for: links may be attached.
    virtual void on_opened() = 0;
    virtual void on_attach(const wire::Performative&) = 0;
    virtual void on_flow(const wire::Performative&) = 0;  // of a link, not of the session alone
    virtual void on_transfer(const wire::Performative&, std::uint64_t now_ns) = 0;
    virtual void on_disposition(const wire::Performative&, std::uint64_t now_ns) = 0;
    virtual void on_detach(const wire::Performative&) = 0;
    virtual void on_closed(const std::string& /*reason*/) {}
};

class Connection {
  public:
    enum class State { kIdle, kConnecting, kSasl, kOpening, kBeginning, kReady, kClosing, kClosed };

    Connection(const Options& options, std::string container, SessionHandler& handler);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    // Starts to connect; the socket belongs to `epoll_fd` from then on, `token` names it there.
    void connect(int epoll_fd, std::uint64_t token);
    void on_event(std::uint32_t events, std::uint64_t now_ns);
    // Writes what is queued, as far as the socket takes it.
    void flush();
    // Sends an empty frame when the peer's idle time-out asks for one.
    void keep_alive(std::uint64_t now_ns);
    // Says goodbye; the state is kClosed when the peer has answered.
    void close();
    // Drops the socket without a word, as a crashed client does.
    void abandon();
    // Drops it because of something that must not happen; `failure` has the reason from then on.
    void fail(const std::string& reason);

    State state() const { return state_; }
    bool is_ready() const { return state_ == State::kReady; }
    bool is_closed() const { return state_ == State::kClosed; }
    const std::string& failure() const { return failure_; }  // the last one; empty: none
    std::size_t queued_bytes() const { return out_.size() - out_start_; }
    // More should not be queued at a time, so that settlements are read in between.
    bool is_full() const { return queued_bytes() >= kFullBytes; }
    std::uint32_t peer_max_frame_bytes() const { return peer_max_frame_bytes_; }

    void queue(const std::uint8_t* data, std::size_t size) {
        out_.insert(out_.end(), data, data + size);
    }

    // How many transfer frames the session takes.
    std::uint32_t session_window() const { return serial_room(session_limit_, next_outgoing_id_); }
    void count_transfer_sent() { ++next_outgoing_id_; }

    // Links by our handle. A grant allows `credit` deliveries beyond the `delivery_count` ones
    // that came, counted from that of the attach.
    void attach(std::uint32_t handle, const LinkSpec& link);
    void attach_session(std::uint32_t handle, const LinkSpec& link);
    void grant(std::uint32_t handle, std::uint32_t delivery_count, std::uint32_t credit,
               bool drains = false);
    void detach(std::uint32_t handle);

  private:
    static constexpr std::size_t kFullBytes = 256 * 1024;

    void read(std::uint64_t now_ns);
    void make_room();
    std::size_t next_unit() const;
    void handle_protocol_header(const std::uint8_t* header);
    void handle_frame(const std::uint8_t* frame, std::size_t size, std::uint64_t now_ns);
    void handle_hot_or_cold(const wire::Performative& frame, std::uint64_t now_ns);
    void handle_flow(const wire::Performative& flow);
    void send_sasl_init();
    void send_open();
    void send_begin();
    void send_bare(wire::Code code);
    void watch_writable(bool wanted);

    const Options& options_;
    std::string container_;
    SessionHandler& handler_;
    State state_ = State::kIdle;
    std::string failure_;
    Stream stream_;
    int epoll_fd_ = -1;
    std::uint64_t token_ = 0;
    bool is_watching_writable_ = false;

    wire::Bytes in_;
    std::size_t in_start_ = 0;
    std::size_t in_end_ = 0;
    wire::Bytes out_;
    std::size_t out_start_ = 0;
    wire::Performative frame_;

    std::uint32_t peer_max_frame_bytes_ = 512;
    std::uint32_t peer_idle_ms_ = 0;
    std::uint64_t last_write_ns_ = 0;
    std::uint32_t next_outgoing_id_ = 0;
    std::uint32_t next_incoming_id_ = 0;
    std::uint32_t session_limit_ = 0;
};

// Monotonic time, the same for all processes of the machine.
std::uint64_t now_ns();
