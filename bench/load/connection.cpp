#include "connection.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

constexpr std::size_t kFirstBufferBytes = 4096;  // idle connections come by the thousand
constexpr std::size_t kMostBufferBytes = 1 << 20;
constexpr std::uint32_t kWideOpenWindow = 0x7fffffff;
constexpr const char* kSessionFilter = "com.microsoft:session-filter";

}  // namespace

std::uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1000000000u +
           static_cast<std::uint64_t>(time.tv_nsec);
}

Connection::Connection(const Options& options, std::string container, SessionHandler& handler)
    : options_(options), container_(std::move(container)), handler_(handler), stream_(options) {}

Connection::~Connection() { abandon(); }

// ---- socket ----------------------------------------------------------------------------------

void Connection::connect(int epoll_fd, std::uint64_t token) {
    abandon();
    in_.assign(kFirstBufferBytes, 0);
    in_start_ = in_end_ = out_start_ = 0;
    out_.clear();
    next_outgoing_id_ = next_incoming_id_ = session_limit_ = 0;
    epoll_fd_ = epoll_fd;
    token_ = token;
    state_ = State::kConnecting;

    stream_.open(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (stream_.fd() < 0) return fail(std::string("socket: ") + std::strerror(errno));
    const int yes = 1;
    setsockopt(stream_.fd(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(options_.port);
    if (inet_pton(AF_INET, options_.host.c_str(), &address.sin_addr) != 1)
        return fail("not an IPv4 address: " + options_.host);
    if (::connect(stream_.fd(), reinterpret_cast<sockaddr*>(&address), sizeof address) < 0 &&
        errno != EINPROGRESS)
        return fail(std::string("connect: ") + std::strerror(errno));
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT;
    event.data.u64 = token_;
    is_watching_writable_ = true;
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, stream_.fd(), &event);
}

void Connection::on_event(std::uint32_t events, std::uint64_t now) {
    if (state_ == State::kConnecting) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(stream_.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0) return fail(std::string("connect: ") + std::strerror(error));
        if ((events & EPOLLOUT) == 0) return;
        if (const std::string wrong = stream_.begin(); !wrong.empty()) return fail(wrong);
        state_ = State::kSasl;
        queue(wire::kSaslHeader, sizeof wire::kSaslHeader);
    }
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) read(now);
    while (stream_.has_more()) read(now);
    if (stream_.fd() >= 0) flush();
}

void Connection::flush() {
    while (out_start_ < out_.size()) {
        const ssize_t sent = stream_.send(&out_[out_start_], out_.size() - out_start_);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN) return fail(std::string("send: ") + std::strerror(errno));
            watch_writable(true);
            return;
        }
        out_start_ += static_cast<std::size_t>(sent);
        last_write_ns_ = 0;  // set by the next keep_alive, so that a write costs no clock call
    }
    out_.clear();
    out_start_ = 0;
    watch_writable(false);
}

void Connection::watch_writable(bool wanted) {
    if (wanted == is_watching_writable_ || stream_.fd() < 0) return;
    is_watching_writable_ = wanted;
    epoll_event event{};
    event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.u64 = token_;
    epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, stream_.fd(), &event);
}

void Connection::read(std::uint64_t now) {
    make_room();
    const ssize_t got = stream_.recv(&in_[in_end_], in_.size() - in_end_);
    if (got == 0) return fail("peer closed the socket");
    if (got < 0) {
        if (errno == EAGAIN || errno == EINTR) return;
        return fail(std::string("recv: ") + std::strerror(errno));
    }
    in_end_ += static_cast<std::size_t>(got);
    try {
        for (std::size_t size; (size = next_unit()) != 0 && in_end_ - in_start_ >= size;) {
            const std::uint8_t* unit = &in_[in_start_];
            in_start_ += size;
            if (std::memcmp(unit, "AMQP", 4) == 0)
                handle_protocol_header(unit);
            else
                handle_frame(unit, size, now);
            if (stream_.fd() < 0) return;
        }
    } catch (const wire::ProtocolError& error) {
        fail(std::string("protocol error of the peer: ") + error.what());
    }
}

// Size of the frame or header at the front of the buffer; 0 when that is not yet known.
std::size_t Connection::next_unit() const {
    if (in_end_ - in_start_ < wire::kFrameHeaderBytes) return 0;
    const std::uint8_t* front = &in_[in_start_];
    if (std::memcmp(front, "AMQP", 4) == 0) return sizeof wire::kAmqpHeader;
    const std::uint32_t size = wire::load_u32(front);
    if (size < wire::kFrameHeaderBytes || size > std::max(options_.max_frame_bytes, 65536u))
        throw wire::ProtocolError("frame size out of bounds");
    return size;
}

// Grows the buffer only after a read has filled it: a connection without traffic stays small.
void Connection::make_room() {
    const bool was_filled = in_end_ == in_.size();
    std::memmove(&in_[0], &in_[in_start_], in_end_ - in_start_);
    in_end_ -= in_start_;
    in_start_ = 0;
    const std::size_t most = std::max<std::size_t>(kMostBufferBytes, options_.max_frame_bytes * 2);
    if (was_filled && in_.size() < most) in_.resize(in_.size() * 4);
}

void Connection::keep_alive(std::uint64_t now) {
    if (state_ != State::kReady || peer_idle_ms_ == 0) return;
    if (last_write_ns_ == 0) last_write_ns_ = now;
    if (now - last_write_ns_ < std::uint64_t{peer_idle_ms_} * 1000000u / 3) return;
    const std::uint8_t empty[wire::kFrameHeaderBytes] = {0, 0, 0, 8, 2, 0, 0, 0};
    queue(empty, sizeof empty);
    flush();
}

void Connection::close() {
    if (state_ == State::kReady) {
        send_bare(wire::kClose);
        state_ = State::kClosing;
        flush();
    } else if (state_ != State::kClosing) {
        abandon();
    }
}

void Connection::abandon() {
    stream_.close();
    if (state_ != State::kIdle) state_ = State::kClosed;
}

void Connection::fail(const std::string& reason) {
    const bool was_expected = state_ == State::kClosing || state_ == State::kClosed;
    abandon();
    if (was_expected) return;
    failure_ = reason;
    handler_.on_closed(reason);
}

// ---- frames in -------------------------------------------------------------------------------

void Connection::handle_protocol_header(const std::uint8_t* header) {
    const bool wants_sasl = state_ == State::kSasl;
    const auto* expected = wants_sasl ? wire::kSaslHeader : wire::kAmqpHeader;
    if (std::memcmp(header, expected, sizeof wire::kAmqpHeader) != 0)
        throw wire::ProtocolError("unexpected protocol header");
}

void Connection::handle_frame(const std::uint8_t* frame, std::size_t size, std::uint64_t now) {
    const std::size_t offset = std::size_t{frame[4]} * 4;
    if (offset < wire::kFrameHeaderBytes || offset > size)
        throw wire::ProtocolError("data offset out of bounds");
    if (offset == size) return;  // a heartbeat
    wire::read_performative(frame + offset, frame + size, frame_);
    handle_hot_or_cold(frame_, now);
}

void Connection::handle_hot_or_cold(const wire::Performative& frame, std::uint64_t now) {
    switch (frame.code) {
        case wire::kTransfer:
            ++next_incoming_id_;
            handler_.on_transfer(frame, now);
            break;
        case wire::kDisposition:
            handler_.on_disposition(frame, now);
            break;
        case wire::kFlow:
            handle_flow(frame);
            break;
        case wire::kSaslMechanisms:
            send_sasl_init();
            break;
        case wire::kSaslOutcome:
            if (frame.fields[0].number != 0) return fail("SASL: user or key refused");
            state_ = State::kOpening;
            queue(wire::kAmqpHeader, sizeof wire::kAmqpHeader);
            send_open();
            break;
        case wire::kOpen:
            peer_max_frame_bytes_ = frame.fields[2].is_null() ? 0xffffffffu : frame.u32(2);
            peer_idle_ms_ = frame.u32(4);
            state_ = State::kBeginning;
            send_begin();
            handler_.on_opened();
            break;
        case wire::kBegin:
            next_incoming_id_ = frame.u32(1);
            session_limit_ = next_outgoing_id_ + frame.u32(2);
            state_ = State::kReady;
            break;
        case wire::kAttach:
            handler_.on_attach(frame);
            break;
        case wire::kDetach:
            handler_.on_detach(frame);
            break;
        case wire::kEnd:
            fail("session ended: " + wire::describe_error(frame.fields[0]));
            break;
        case wire::kClose:
            fail("connection closed: " + wire::describe_error(frame.fields[0]));
            break;
        default:
            throw wire::ProtocolError("unknown performative");
    }
}

void Connection::handle_flow(const wire::Performative& flow) {
    const std::uint32_t seen = flow.fields[0].is_null() ? 0 : flow.u32(0);
    session_limit_ = seen + flow.u32(1);
    if (!flow.fields[4].is_null()) handler_.on_flow(flow);
}

// ---- frames out ------------------------------------------------------------------------------

void Connection::send_sasl_init() {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kSaslFrame);
    const std::size_t list = encoder.open_list(wire::kSaslInit);
    if (options_.user.empty()) {
        encoder.symbol("ANONYMOUS");
        encoder.binary("load");
    } else {
        encoder.symbol("PLAIN");
        const std::string nul(1, '\0');
        encoder.binary(nul + options_.user + nul + options_.password);
    }
    encoder.string(options_.hostname);
    encoder.close_list(list, 3);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::send_open() {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kOpen);
    encoder.string(container_);
    encoder.string(options_.hostname);
    encoder.uint(options_.max_frame_bytes);
    encoder.ushort(0);  // one channel
    encoder.close_list(list, 4);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::send_begin() {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kBegin);
    encoder.null();
    encoder.uint(next_outgoing_id_);
    encoder.uint(kWideOpenWindow);
    encoder.uint(kWideOpenWindow);
    encoder.uint(wire::kHandleMax);
    encoder.close_list(list, 5);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::attach(std::uint32_t handle, const LinkSpec& link) {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kAttach);
    encoder.string(link.name);
    encoder.uint(handle);
    encoder.boolean(!link.is_sender);
    encoder.ubyte(0);  // snd-settle-mode unsettled
    encoder.ubyte(!link.is_sender && options_.confirms_settlement ? 1 : 0);
    std::size_t terminus = encoder.open_list(wire::kSource);
    encoder.string(link.is_sender ? link.name : link.address);
    encoder.close_list(terminus, 1);
    terminus = encoder.open_list(wire::kTarget);
    encoder.string(link.is_sender ? link.address : link.name);
    encoder.close_list(terminus, 1);
    if (link.is_sender) {
        encoder.null();
        encoder.null();
        encoder.uint(0);  // initial-delivery-count
    }
    encoder.close_list(list, link.is_sender ? 10 : 7);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

// Asks for the next available session: the filter is there, its value is null.
void Connection::attach_session(std::uint32_t handle, const LinkSpec& link) {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kAttach);
    encoder.string(link.name);
    encoder.uint(handle);
    encoder.boolean(true);  // a receiver
    encoder.ubyte(0);
    encoder.ubyte(options_.confirms_settlement ? 1 : 0);
    const std::size_t source = encoder.open_list(wire::kSource);
    encoder.string(link.address);
    for (int field = 1; field < 7; ++field) encoder.null();
    const std::size_t filters = encoder.open_map();
    encoder.symbol(kSessionFilter);
    encoder.null();
    encoder.close_map(filters, 2);
    encoder.close_list(source, 8);
    const std::size_t target = encoder.open_list(wire::kTarget);
    encoder.string(link.name);
    encoder.close_list(target, 1);
    encoder.close_list(list, 7);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::detach(std::uint32_t handle) {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kDetach);
    encoder.uint(handle);
    encoder.boolean(true);  // closed
    encoder.close_list(list, 2);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::grant(std::uint32_t handle, std::uint32_t delivery_count, std::uint32_t credit,
                       bool drains) {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    const std::size_t list = encoder.open_list(wire::kFlow);
    encoder.uint(next_incoming_id_);
    encoder.uint(kWideOpenWindow);
    encoder.uint(next_outgoing_id_);
    encoder.uint(kWideOpenWindow);
    encoder.uint(handle);
    encoder.uint(delivery_count);
    encoder.uint(credit);
    if (drains) {
        encoder.null();  // available
        encoder.boolean(true);
    }
    encoder.close_list(list, drains ? 9 : 7);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}

void Connection::send_bare(wire::Code code) {
    wire::Encoder encoder;
    const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
    encoder.close_list(encoder.open_list(code), 0);
    encoder.close_frame(frame);
    queue(encoder.out.data(), encoder.out.size());
}
