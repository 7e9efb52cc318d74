// The message that is sent again and again: encoded once, cut into frames, patched in place.
#pragma once

#include <cstdint>
#include <vector>

#include "options.hpp"
#include "wire.hpp"

// The first bytes of each body, in the byte order of the machine, which both ends share.
struct Stamp {
    std::uint64_t run_id;    // distinguishes messages of this run from leftovers
    std::uint64_t due_ns;    // when the message was, or in an open loop should have been, sent
};

class EncodedMessage {
  public:
    struct Frame {
        std::size_t offset;
        std::size_t size;
    };

    EncodedMessage(const Options& options, std::uint32_t handle, std::uint32_t max_frame_bytes);

    // `number` is that of the message among all of its run.
    void patch(std::uint32_t delivery_id, const Stamp& stamp, std::uint64_t number);
    const std::vector<Frame>& frames() const { return frames_; }
    const std::uint8_t* data() const { return bytes_.data(); }

  private:
    wire::Bytes bytes_;
    std::vector<Frame> frames_;
    std::size_t id_at_ = 0;
    std::size_t tag_at_ = 0;
    std::size_t stamp_at_ = 0;
    std::size_t message_id_at_ = 0;  // 0: there is none
    std::size_t session_id_at_ = 0;
    std::size_t ttl_at_ = 0;
    std::size_t due_at_ = 0;
    std::uint32_t sessions_;
    std::uint32_t ttl_ms_;
    std::uint64_t due_ms_;  // since the epoch, of the first message
};
