#include "message.hpp"

#include <algorithm>
#include <chrono>
#include <random>

namespace {

constexpr std::size_t kMessageIdChars = 32;
constexpr std::size_t kSessionIdDigits = 6;
constexpr char kSessionIdPrefix[] = "session-";

// The sections of a message, and where in it something differs from one message to the next.
struct Layout {
    wire::Bytes bytes;
    std::size_t ttl_at = 0;         // 0: there is none, as of all below
    std::size_t due_at = 0;
    std::size_t message_id_at = 0;
    std::size_t session_id_at = 0;  // of its digits
    std::size_t body_at = 0;
};

void encode_header(wire::Encoder& encoder, const Options& options, Layout& layout) {
    const auto durable = static_cast<std::uint8_t>(options.is_durable ? 0x41 : 0x42);
    if (options.ttl_s == 0) {
        const std::uint8_t header[] = {0x00, 0x53, wire::kHeaderSection, 0xc0, 0x02, 0x01, durable};
        encoder.raw(header, sizeof header);
        return;
    }
    const std::uint8_t header[] = {0x00, 0x53, wire::kHeaderSection, 0xc0, 8, 3, durable, 0x40};
    encoder.raw(header, sizeof header);
    layout.ttl_at = encoder.patchable_uint();
}

void encode_annotations(wire::Encoder& encoder, const Options& options, Layout& layout) {
    if (options.schedule_s == 0) return;
    const std::uint8_t head[] = {0x00, 0x53, wire::kMessageAnnotationsSection};
    encoder.raw(head, sizeof head);
    const std::size_t map = encoder.open_map();
    encoder.symbol("x-opt-scheduled-enqueue-time");
    encoder.byte(0x83);
    layout.due_at = encoder.out.size();
    const std::uint8_t timestamp[8] = {};
    encoder.raw(timestamp, sizeof timestamp);
    encoder.close_map(map, 2);
}

void encode_properties(wire::Encoder& encoder, const Options& options, Layout& layout) {
    if (!options.has_message_ids && options.sessions == 0) return;
    // A short list, as the SDKs write it: fields up to group-id, the eleventh.
    const std::uint8_t head[] = {0x00, 0x53, wire::kPropertiesSection, 0xc0, 0, 0};
    encoder.raw(head, sizeof head);
    const std::size_t start = encoder.out.size();
    std::uint8_t count = 1;
    if (options.has_message_ids) {
        encoder.string(std::string(kMessageIdChars, '0'));
        layout.message_id_at = encoder.out.size() - kMessageIdChars;
    } else {
        encoder.null();
    }
    if (options.sessions != 0) {
        for (; count < 10; ++count) encoder.null();
        encoder.string(kSessionIdPrefix + std::string(kSessionIdDigits, '0'));
        layout.session_id_at = encoder.out.size() - kSessionIdDigits;
        ++count;
    }
    encoder.out[start - 2] = static_cast<std::uint8_t>(encoder.out.size() - start + 1);
    encoder.out[start - 1] = count;
}

void encode_application_properties(wire::Encoder& encoder, const Options& options) {
    if (options.properties.empty()) return;
    const std::uint8_t head[] = {0x00, 0x53, wire::kApplicationPropertiesSection};
    encoder.raw(head, sizeof head);
    const std::size_t map = encoder.open_map();
    for (const auto& [name, value] : options.properties) {
        encoder.string(name);
        if (!value.empty() && value.size() < 10 &&
            value.find_first_not_of("0123456789") == std::string::npos) {
            encoder.byte(0x71);
            std::uint8_t number[4];
            wire::store_u32(number, static_cast<std::uint32_t>(std::stoul(value)));
            encoder.raw(number, sizeof number);
        } else {
            encoder.string(value);
        }
    }
    encoder.close_map(map, static_cast<std::uint32_t>(options.properties.size() * 2));
}

// Header, what the options ask for, and one data section. The content is random: nothing on
// the way can compress it.
Layout encode_bare_message(const Options& options) {
    Layout layout;
    wire::Encoder encoder;
    encode_header(encoder, options, layout);
    encode_annotations(encoder, options, layout);
    encode_properties(encoder, options, layout);
    encode_application_properties(encoder, options);
    const std::uint8_t section[] = {0x00, 0x53, wire::kDataSection, 0xb0, 0, 0, 0, 0};
    encoder.raw(section, sizeof section);
    const std::size_t body_at = layout.body_at = encoder.out.size();
    wire::store_u32(&encoder.out[body_at - 4], options.body_bytes);
    std::mt19937 random(20240229);
    encoder.out.reserve(body_at + options.body_bytes + sizeof(std::uint32_t));
    while (encoder.out.size() < body_at + options.body_bytes) {
        const auto word = static_cast<std::uint32_t>(random());
        encoder.raw(&word, sizeof word);
    }
    encoder.out.resize(body_at + options.body_bytes);
    layout.bytes = std::move(encoder.out);
    return layout;
}

void store_digits(std::uint8_t* at, std::size_t count, std::uint64_t value, unsigned base) {
    for (std::size_t left = count; left-- != 0; value /= base)
        at[left] = static_cast<std::uint8_t>("0123456789abcdef"[value % base]);
}

std::uint64_t wall_ms() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

}  // namespace

EncodedMessage::EncodedMessage(const Options& options, std::uint32_t handle,
                               std::uint32_t max_frame_bytes)
    : sessions_(options.sessions),
      ttl_ms_(static_cast<std::uint32_t>(options.ttl_s * 1e3)),
      due_ms_(wall_ms() + static_cast<std::uint64_t>(options.schedule_s * 1e3)) {
    const Layout layout = encode_bare_message(options);
    const wire::Bytes& message = layout.bytes;
    wire::Encoder encoder;
    std::size_t taken = 0;
    while (taken < message.size()) {
        const bool is_first = taken == 0;
        const std::size_t frame = encoder.open_frame(wire::kAmqpFrame);
        const std::size_t list = encoder.open_list(wire::kTransfer);
        encoder.uint(handle);
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
        if (is_first) {
            const std::size_t start = encoder.out.size();
            stamp_at_ = start + layout.body_at;
            if (layout.ttl_at != 0) ttl_at_ = start + layout.ttl_at;
            if (layout.due_at != 0) due_at_ = start + layout.due_at;
            if (layout.message_id_at != 0) message_id_at_ = start + layout.message_id_at;
            if (layout.session_id_at != 0) session_id_at_ = start + layout.session_id_at;
        }
        encoder.raw(&message[taken], size);
        encoder.close_frame(frame);
        frames_.push_back({frame, encoder.out.size() - frame});
        taken += size;
    }
    bytes_ = std::move(encoder.out);
}

void EncodedMessage::patch(std::uint32_t delivery_id, const Stamp& stamp, std::uint64_t number) {
    wire::store_u32(&bytes_[id_at_], delivery_id);
    wire::store_u32(&bytes_[tag_at_], delivery_id);
    std::memcpy(&bytes_[stamp_at_], &stamp, sizeof stamp);
    if (ttl_at_ != 0)
        wire::store_u32(&bytes_[ttl_at_], ttl_ms_ + static_cast<std::uint32_t>(number));
    if (due_at_ != 0) wire::store_u64(&bytes_[due_at_], due_ms_ + number);
    if (message_id_at_ != 0) {
        store_digits(&bytes_[message_id_at_], 16, stamp.run_id, 16);
        store_digits(&bytes_[message_id_at_ + 16], 16, number, 16);
    }
    if (session_id_at_ != 0)
        store_digits(&bytes_[session_id_at_], kSessionIdDigits, number % sessions_, 10);
}
