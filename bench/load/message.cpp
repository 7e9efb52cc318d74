#include "message.hpp"

#include <algorithm>
#include <random>

namespace {

// Header and one data section. The content is random: nothing on the way can compress it.
wire::Bytes encode_bare_message(std::uint32_t body_bytes, bool is_durable, std::size_t& body_at) {
    wire::Encoder encoder;
    const std::uint8_t header[] = {0x00, 0x53, wire::kHeaderSection, 0xc0, 0x02, 0x01,
                                   static_cast<std::uint8_t>(is_durable ? 0x41 : 0x42)};
    encoder.raw(header, sizeof header);
    const std::uint8_t section[] = {0x00, 0x53, wire::kDataSection, 0xb0, 0, 0, 0, 0};
    encoder.raw(section, sizeof section);
    body_at = encoder.out.size();
    wire::store_u32(&encoder.out[body_at - 4], body_bytes);
    std::mt19937 random(20240229);
    encoder.out.reserve(body_at + body_bytes + sizeof(std::uint32_t));
    while (encoder.out.size() < body_at + body_bytes) {
        const auto word = static_cast<std::uint32_t>(random());
        encoder.raw(&word, sizeof word);
    }
    encoder.out.resize(body_at + body_bytes);
    return std::move(encoder.out);
}

}  // namespace

EncodedMessage::EncodedMessage(std::uint32_t body_bytes, bool is_durable,
                               std::uint32_t max_frame_bytes) {
    std::size_t body_at = 0;
    const wire::Bytes message = encode_bare_message(body_bytes, is_durable, body_at);
    wire::Encoder encoder;
    std::size_t taken = 0;
    while (taken < message.size()) {
        const bool is_first = taken == 0;
        const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
        const std::size_t list = encoder.open_list(wire::kTransfer);
        encoder.uint(0);  // handle
        if (is_first) {
            id_at_ = encoder.patchable_uint();
            encoder.binary(std::string(4, '\0'));
            tag_at_ = encoder.out.size() - 4;
            encoder.uint(0);         // message-format
            encoder.boolean(false);  // settled
        } else {
            for (int field = 0; field < 4; ++field) encoder.null();
        }
        // The list so far, the `more` flag and the rest of the message must fit the frame.
        const std::size_t head = encoder.out.size() + 1 - frame;
        const std::size_t room = max_frame_bytes - head;
        const std::size_t size = std::min(room, message.size() - taken);
        encoder.boolean(taken + size < message.size());
        encoder.close_list(list, 6);
        if (is_first) stamp_at_ = encoder.out.size() + body_at;
        encoder.raw(&message[taken], size);
        encoder.close_frame(frame);
        frames_.push_back({frame, encoder.out.size() - frame});
        taken += size;
    }
    bytes_ = std::move(encoder.out);
}

void EncodedMessage::patch(std::uint32_t delivery_id, const Stamp& stamp) {
    wire::store_u32(&bytes_[id_at_], delivery_id);
    wire::store_u32(&bytes_[tag_at_], delivery_id);
    std::memcpy(&bytes_[stamp_at_], &stamp, sizeof stamp);
}
