// AMQP 1.0 bytes: building the frames a client sends, reading the ones it gets.
// Nothing here knows about sockets or about time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace wire {

using Bytes = std::vector<std::uint8_t>;

// The peer sent something that is not AMQP 1.0; the connection is of no more use.
struct ProtocolError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Descriptor codes. Source: AMQP 1.0 parts 2.7, 3.2, 3.4 and 5.3.
enum Code : std::uint8_t {
    kOpen = 0x10,
    kBegin = 0x11,
    kAttach = 0x12,
    kFlow = 0x13,
    kTransfer = 0x14,
    kDisposition = 0x15,
    kDetach = 0x16,
    kEnd = 0x17,
    kClose = 0x18,
    kError = 0x1d,
    kAccepted = 0x24,
    kRejected = 0x25,
    kReleased = 0x26,
    kModified = 0x27,
    kSource = 0x28,
    kTarget = 0x29,
    kSaslMechanisms = 0x40,
    kSaslInit = 0x41,
    kSaslOutcome = 0x44,
    kHeaderSection = 0x70,
    kMessageAnnotationsSection = 0x72,
    kPropertiesSection = 0x73,
    kApplicationPropertiesSection = 0x74,
    kDataSection = 0x75,
};

enum FrameType : std::uint8_t { kAmqpFrame = 0, kSaslFrame = 1 };

constexpr std::size_t kFrameHeaderBytes = 8;
constexpr std::uint32_t kHandleMax = 1023;
constexpr std::uint8_t kSaslHeader[8] = {'A', 'M', 'Q', 'P', 3, 1, 0, 0};
constexpr std::uint8_t kAmqpHeader[8] = {'A', 'M', 'Q', 'P', 0, 1, 0, 0};

inline std::uint32_t load_u32(const std::uint8_t* at) {
    std::uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return __builtin_bswap32(value);
}

inline void store_u32(std::uint8_t* at, std::uint32_t value) {
    value = __builtin_bswap32(value);
    std::memcpy(at, &value, sizeof value);
}

inline void store_u64(std::uint8_t* at, std::uint64_t value) {
    value = __builtin_bswap64(value);
    std::memcpy(at, &value, sizeof value);
}

// Appends AMQP values to a byte vector. Lists are written in their 32-bit form and get their
// size and count when they are closed.
class Encoder {
  public:
    Bytes out;

    void byte(std::uint8_t value) { out.push_back(value); }
    void raw(const void* data, std::size_t size);
    void null() { byte(0x40); }
    void boolean(bool value) { byte(value ? 0x41 : 0x42); }
    void ubyte(std::uint8_t value);
    void ushort(std::uint16_t value);
    void uint(std::uint32_t value);
    // A uint in its four-byte form whose offset is returned, to be patched for each message.
    std::size_t patchable_uint();
    void string(std::string_view value) { sized(0xa1, 0xb1, value); }
    void symbol(std::string_view value) { sized(0xa3, 0xb3, value); }
    void binary(std::string_view value) { sized(0xa0, 0xb0, value); }

    std::size_t open_list(Code descriptor);
    void close_list(std::size_t mark, std::uint32_t count);
    // A map without descriptor; `count` is that of keys and values together.
    std::size_t open_map();
    void close_map(std::size_t mark, std::uint32_t count) { close_list(mark, count); }

    // Starts a frame on channel 0; close_frame writes its size.
    std::size_t open_frame(FrameType type);
    void close_frame(std::size_t mark);

  private:
    void sized(std::uint8_t small, std::uint8_t large, std::string_view value);
};

// One decoded field. Numbers of every width land in `number`; strings, symbols, binaries and
// whole lists, maps and arrays are views into the frame.
struct Value {
    std::uint8_t code = 0x40;
    bool is_described = false;
    std::uint64_t descriptor = 0;
    std::uint64_t number = 0;
    const std::uint8_t* data = nullptr;
    std::size_t size = 0;

    bool is_null() const { return code == 0x40 && !is_described; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data), size}; }
};

// Reads one value at `at`, which moves behind it. Throws ProtocolError at the end of the bytes.
Value read_value(const std::uint8_t*& at, const std::uint8_t* end);

// A performative with its fields (absent ones are null) and what follows it in the frame.
struct Performative {
    std::uint64_t code = 0;
    std::array<Value, 14> fields{};
    const std::uint8_t* payload = nullptr;
    std::size_t payload_size = 0;

    std::uint32_t u32(std::size_t index) const {
        return static_cast<std::uint32_t>(fields[index].number);
    }
};

// `body` starts behind the frame header.
void read_performative(const std::uint8_t* body, const std::uint8_t* end, Performative& out);

// The fields of a described list (an error, an outcome), up to `limit`.
std::vector<Value> read_list(const Value& list, std::size_t limit);

// The content of the first data section, or null when it does not start within the bytes given.
const std::uint8_t* find_data_section(const std::uint8_t* at, const std::uint8_t* end,
                                      std::size_t wanted_bytes);

// "amqp:not-found: no such queue" out of a close, end or detach.
std::string describe_error(const Value& error);

}  // namespace wire
