// The message that is sent again and again: encoded once, cut into frames, patched in place.
#pragma once

#include <cstdint>
#include <vector>

#include "wire.hpp"

// What the first bytes of each body say; in the byte order of the machine, which both ends share.
struct Stamp {
    std::uint64_t run_id;    // tells messages of this run from leftovers of another
    std::uint64_t due_ns;    // when the message was, or in an open loop should have been, sent
};

class EncodedMessage {
  public:
    struct Frame {
        std::size_t offset;
        std::size_t size;
    };

    EncodedMessage(std::uint32_t body_bytes, bool is_durable, std::uint32_t max_frame_bytes);

    void patch(std::uint32_t delivery_id, const Stamp& stamp);
    const std::vector<Frame>& frames() const { return frames_; }
    const std::uint8_t* data() const { return bytes_.data(); }

  private:
    wire::Bytes bytes_;
    std::vector<Frame> frames_;
    std::size_t id_at_ = 0;
    std::size_t tag_at_ = 0;
    std::size_t stamp_at_ = 0;
};
