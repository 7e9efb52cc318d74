// One AMQP connection with one session and one link on it, over a non-blocking socket.
//
// The hand-shake goes step by step, as client libraries do it: SASL, open, then begin and
// attach together. What arrives afterwards is told to the LinkHandler.
#pragma once

#include <cstdint>
#include <string>

#include "options.hpp"
#include "stream.hpp"
#include "wire.hpp"

struct LinkSpec {
    std::string name;
    std::string address;
    bool is_sender = true;
    bool has_many = false;  // no link by itself: the handler attaches receivers of sessions
};

class LinkHandler {
  public:
    virtual ~LinkHandler() = default;
    virtual void on_attached() {}
    virtual void on_flow() {}
    virtual void on_transfer(const wire::Performative&, std::uint64_t /*now_ns*/) {}
    virtual void on_disposition(const wire::Performative&, std::uint64_t /*now_ns*/) {}
    // Of the links that the handler attached itself; fields are those of the frame.
    virtual void on_link_attached(const wire::Performative&) {}
    virtual void on_link_flow(const wire::Performative&) {}
    virtual void on_link_detached(const wire::Performative&) {}
    virtual void on_closed(const std::string& /*reason*/) {}
};

class Connection {
  public:
    enum class State { kIdle, kConnecting, kSasl, kOpening, kAttaching, kReady, kClosing, kClosed };

    Connection(const Options& options, LinkSpec link, LinkHandler& handler);
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

    State state() const { return state_; }
    bool is_ready() const { return state_ == State::kReady; }
    bool is_closed() const { return state_ == State::kClosed; }
    std::size_t queued_bytes() const { return out_.size() - out_start_; }
    std::uint32_t peer_max_frame_bytes() const { return peer_max_frame_bytes_; }

    void queue(const std::uint8_t* data, std::size_t size) {
        out_.insert(out_.end(), data, data + size);
    }

    // Sender: how many transfer frames the session and how many deliveries the link takes.
    std::uint32_t session_window() const { return left(session_limit_, next_outgoing_id_); }
    std::uint32_t credit() const { return left(link_limit_, delivery_count_); }
    void count_transfer_sent(bool ends_delivery) {
        ++next_outgoing_id_;
        if (ends_delivery) ++delivery_count_;
    }

    // Receiver: allows `credit` deliveries beyond the `delivery_count` ones that came.
    void grant(std::uint32_t delivery_count, std::uint32_t credit);

    // Links of the handler's own, by handle. `delivery_count` is the link's, from its attach on.
    void attach_session(std::uint32_t handle, const std::string& name);
    void grant_link(std::uint32_t handle, std::uint32_t delivery_count, std::uint32_t credit,
                    bool drains);
    void detach_link(std::uint32_t handle);

  private:
    static std::uint32_t left(std::uint32_t limit, std::uint32_t used) {
        const auto room = static_cast<std::int32_t>(limit - used);  // serial numbers wrap
        return room < 0 ? 0 : static_cast<std::uint32_t>(room);
    }

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
    void send_attach();
    void send_bare(wire::Code code);
    void fail(const std::string& reason);
    void watch_writable(bool wanted);

    const Options& options_;
    LinkSpec link_;
    LinkHandler& handler_;
    State state_ = State::kIdle;
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
    std::uint32_t delivery_count_ = 0;
    std::uint32_t link_limit_ = 0;
};

// Monotonic time, the same for all processes of the machine.
std::uint64_t now_ns();
