#include "stream.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#if __has_include(<openssl/ssl.h>)
#include <openssl/err.h>
#include <openssl/ssl.h>
#define HAS_TLS 1
#else
#define HAS_TLS 0
#endif

namespace {

constexpr std::uint8_t kBinary = 0x82;
constexpr std::uint8_t kMasked = 0x80;
constexpr std::size_t kMaskBytes = 4;

void set_blocking(int fd, bool wanted) {
    const int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, wanted ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

#if HAS_TLS
SSL_CTX* tls_context() {
    static SSL_CTX* context = [] {
        std::signal(SIGPIPE, SIG_IGN);  // OpenSSL writes without MSG_NOSIGNAL
        SSL_CTX* made = SSL_CTX_new(TLS_client_method());
        SSL_CTX_set_mode(made, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        return made;  // certificates are not looked at: the broker is the one under test
    }();
    return context;
}

ssize_t tls_result(void* tls, int done) {
    if (done > 0) return done;
    const int why = SSL_get_error(static_cast<SSL*>(tls), done);
    if (why == SSL_ERROR_ZERO_RETURN) return 0;
    errno = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? EAGAIN : EPROTO;
    ERR_clear_error();
    return -1;
}
#endif

}  // namespace

bool Stream::is_websocket() const {
    return options_.transport == Transport::kWebSocket ||
           options_.transport == Transport::kTlsWebSocket;
}

void Stream::open(int fd) {
    close();
    fd_ = fd;
}

std::string Stream::begin() {
    const bool is_tls =
        options_.transport == Transport::kTls || options_.transport == Transport::kTlsWebSocket;
    if (!is_tls && !is_websocket()) return "";
    set_blocking(fd_, true);
    if (is_tls) {
#if HAS_TLS
        SSL* tls = SSL_new(tls_context());
        tls_ = tls;
        SSL_set_fd(tls, fd_);
        SSL_set_tlsext_host_name(tls, options_.hostname.c_str());
        if (SSL_connect(tls) != 1) return "TLS: the hand-shake failed";
#else
        return "TLS: built without the headers of OpenSSL";
#endif
    }
    std::string error = is_websocket() ? shake_hands() : "";
    set_blocking(fd_, false);
    return error;
}

std::string Stream::shake_hands() {
    const std::string request =
        "GET /$servicebus/websocket HTTP/1.1\r\nHost: " + options_.hostname +
        "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: AMQPWSB10\r\n\r\n";
    write_raw(reinterpret_cast<const std::uint8_t*>(request.data()), request.size());
    std::string answer;
    while (answer.size() < 4 || answer.compare(answer.size() - 4, 4, "\r\n\r\n") != 0) {
        std::uint8_t byte = 0;  // one by one: what follows belongs to the frames
        if (read_raw(&byte, 1) != 1) return "WebSocket: the peer hung up";
        answer.push_back(static_cast<char>(byte));
    }
    if (answer.compare(0, 12, "HTTP/1.1 101") != 0) return "WebSocket: " + answer.substr(0, 40);
    return "";
}

ssize_t Stream::send(const std::uint8_t* data, std::size_t size) {
    if (!is_websocket()) return write_raw(data, size);
    if (frame_left_ == 0) {
        head_ = {kBinary};
        const std::size_t length_bytes = size < 126 ? 0 : size < 65536 ? 2 : 8;
        head_.push_back(static_cast<std::uint8_t>(
            kMasked | (length_bytes == 0 ? size : length_bytes == 2 ? 126 : 127)));
        for (std::size_t at = length_bytes; at > 0; --at)
            head_.push_back(static_cast<std::uint8_t>(std::uint64_t{size} >> (8 * (at - 1))));
        head_.insert(head_.end(), kMaskBytes, 0);
        frame_left_ = size;
    }
    while (!head_.empty()) {
        const ssize_t sent = write_raw(head_.data(), head_.size());
        if (sent < 0) return sent;
        head_.erase(head_.begin(), head_.begin() + sent);
    }
    const ssize_t sent = write_raw(data, std::min(size, frame_left_));
    if (sent > 0) frame_left_ -= static_cast<std::size_t>(sent);
    return sent;
}

// Takes the heads of frames out of what came.
ssize_t Stream::recv(std::uint8_t* data, std::size_t size) {
    const ssize_t got = read_raw(data, size);
    if (got <= 0 || !is_websocket()) return got;
    const std::uint8_t *from = data, *end = data + got;
    std::uint8_t* to = data;
    while (from < end) {
        if (in_left_ > 0) {
            const std::size_t part = static_cast<std::size_t>(
                std::min<std::uint64_t>(in_left_, static_cast<std::uint64_t>(end - from)));
            std::memmove(to, from, part);
            to += part, from += part, in_left_ -= part;
            continue;
        }
        in_head_.push_back(*from++);
        if (in_head_.size() < 2) continue;
        if (in_head_[0] != kBinary) return 0;  // a close frame
        const std::size_t length_bytes = in_head_[1] < 126 ? 0 : in_head_[1] == 126 ? 2 : 8;
        if (in_head_.size() < 2 + length_bytes) continue;
        in_left_ = length_bytes == 0 ? in_head_[1] : 0;
        for (std::size_t at = 0; at < length_bytes; ++at) in_left_ = in_left_ << 8 | in_head_[2 + at];
        in_head_.clear();
    }
    if (to != data) return to - data;
    errno = EAGAIN;
    return -1;
}

bool Stream::has_more() const {
#if HAS_TLS
    return tls_ != nullptr && SSL_pending(static_cast<SSL*>(tls_)) > 0;
#else
    return false;
#endif
}

void Stream::close() {
#if HAS_TLS
    if (tls_ != nullptr) SSL_free(static_cast<SSL*>(tls_));
#endif
    tls_ = nullptr;
    if (fd_ >= 0) ::close(fd_);  // leaves the epoll set by itself
    fd_ = -1;
    head_.clear();
    in_head_.clear();
    frame_left_ = 0;
    in_left_ = 0;
}

ssize_t Stream::write_raw(const std::uint8_t* data, std::size_t size) {
#if HAS_TLS
    if (tls_ != nullptr) {
        const int most = static_cast<int>(std::min<std::size_t>(size, 1 << 30));
        return tls_result(tls_, SSL_write(static_cast<SSL*>(tls_), data, most));
    }
#endif
    return ::send(fd_, data, size, MSG_NOSIGNAL);
}

ssize_t Stream::read_raw(std::uint8_t* data, std::size_t size) {
#if HAS_TLS
    if (tls_ != nullptr) {
        const int most = static_cast<int>(std::min<std::size_t>(size, 1 << 30));
        return tls_result(tls_, SSL_read(static_cast<SSL*>(tls_), data, most));
    }
#endif
    return ::recv(fd_, data, size, 0);
}
