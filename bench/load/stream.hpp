// The bytes of one connection: a TCP socket, with TLS or WebSocket around them when asked for.
//
// Hand-shakes block; what follows does not, and fails with EAGAIN as a socket does. Frames of
// WebSocket are masked with zeros: the broker unmasks all the same, and here it costs nothing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"

class Stream {
  public:
    explicit Stream(const Options& options) : options_(options) {}
    ~Stream() { close(); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    int fd() const { return fd_; }
    // Takes over a socket that is being connected.
    void open(int fd);
    // Shakes hands on the connected socket; returns what went wrong, or nothing.
    std::string begin();
    ssize_t send(const std::uint8_t* data, std::size_t size);
    ssize_t recv(std::uint8_t* data, std::size_t size);
    // Whether there is more to read of what the socket has given already.
    bool has_more() const;
    void close();

  private:
    bool is_websocket() const;
    std::string shake_hands();
    ssize_t write_raw(const std::uint8_t* data, std::size_t size);
    ssize_t read_raw(std::uint8_t* data, std::size_t size);

    const Options& options_;
    int fd_ = -1;
    void* tls_ = nullptr;
    std::vector<std::uint8_t> head_;    // what is left of the head of a frame to be written
    std::size_t frame_left_ = 0;        // ... and of its payload
    std::vector<std::uint8_t> in_head_; // the head of a frame, as far as it came
    std::uint64_t in_left_ = 0;
};
