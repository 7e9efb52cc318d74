#include "wire.hpp"

namespace wire {

// ---- writing ---------------------------------------------------------------------------------

void Encoder::raw(const void* data, std::size_t size) {
    const auto* first = static_cast<const std::uint8_t*>(data);
    out.insert(out.end(), first, first + size);
}

void Encoder::ubyte(std::uint8_t value) {
    byte(0x50);
    byte(value);
}

void Encoder::ushort(std::uint16_t value) {
    byte(0x60);
    byte(static_cast<std::uint8_t>(value >> 8));
    byte(static_cast<std::uint8_t>(value));
}

void Encoder::uint(std::uint32_t value) {
    if (value == 0) {
        byte(0x43);
    } else if (value < 256) {
        byte(0x52);
        byte(static_cast<std::uint8_t>(value));
    } else {
        store_u32(&out[patchable_uint()], value);
    }
}

std::size_t Encoder::patchable_uint() {
    byte(0x70);
    const std::size_t at = out.size();
    out.resize(at + 4);
    return at;
}

void Encoder::sized(std::uint8_t small, std::uint8_t large, std::string_view value) {
    if (value.size() < 256) {
        byte(small);
        byte(static_cast<std::uint8_t>(value.size()));
    } else {
        byte(large);
        const std::size_t at = out.size();
        out.resize(at + 4);
        store_u32(&out[at], static_cast<std::uint32_t>(value.size()));
    }
    raw(value.data(), value.size());
}

std::size_t Encoder::open_list(Code descriptor) {
    const std::uint8_t prefix[] = {0x00, 0x53, descriptor, 0xd0};
    raw(prefix, sizeof prefix);
    const std::size_t mark = out.size();
    out.resize(mark + 8);
    return mark;
}

std::size_t Encoder::open_map() {
    byte(0xd1);
    const std::size_t mark = out.size();
    out.resize(mark + 8);
    return mark;
}

void Encoder::close_list(std::size_t mark, std::uint32_t count) {
    store_u32(&out[mark], static_cast<std::uint32_t>(out.size() - mark - 4));
    store_u32(&out[mark + 4], count);
}

std::size_t Encoder::open_frame(FrameType type) {
    const std::size_t mark = out.size();
    const std::uint8_t header[kFrameHeaderBytes] = {0, 0, 0, 0, 2, type, 0, 0};
    raw(header, sizeof header);
    return mark;
}

void Encoder::close_frame(std::size_t mark) {
    store_u32(&out[mark], static_cast<std::uint32_t>(out.size() - mark));
}

// ---- reading ---------------------------------------------------------------------------------

namespace {

void need(const std::uint8_t* at, const std::uint8_t* end, std::size_t size) {
    if (static_cast<std::size_t>(end - at) < size) throw ProtocolError("value cut short");
}

std::uint64_t load_big_endian(const std::uint8_t* at, std::size_t size) {
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < size; ++i) value = value << 8 | at[i];
    return value;
}

}  // namespace

Value read_value(const std::uint8_t*& at, const std::uint8_t* end) {
    need(at, end, 1);
    Value value;
    value.code = *at++;
    if (value.code == 0x00) {
        const Value descriptor = read_value(at, end);
        value = read_value(at, end);
        value.is_described = true;
        value.descriptor = descriptor.number;
        return value;
    }
    // The high half byte of a constructor is the width of the value. Source: AMQP 1.0, 1.2.
    std::size_t fixed = 0;
    std::size_t length_bytes = 0;
    switch (value.code >> 4) {
        case 0x4: break;
        case 0x5: fixed = 1; break;
        case 0x6: fixed = 2; break;
        case 0x7: fixed = 4; break;
        case 0x8: fixed = 8; break;
        case 0x9: fixed = 16; break;
        case 0xa: case 0xc: case 0xe: length_bytes = 1; break;
        case 0xb: case 0xd: case 0xf: length_bytes = 4; break;
        default: throw ProtocolError("unknown constructor");
    }
    if (length_bytes != 0) {
        need(at, end, length_bytes);
        value.size = load_big_endian(at, length_bytes);
        at += length_bytes;
        need(at, end, value.size);
        value.data = at;
        at += value.size;
    } else if (fixed != 0) {
        need(at, end, fixed);
        if (fixed <= 8) value.number = load_big_endian(at, fixed);
        at += fixed;
    } else {
        value.number = value.code == 0x41 ? 1 : 0;
    }
    return value;
}

namespace {

// Where the items of a list start, and how many there are.
struct Items {
    const std::uint8_t* at;
    const std::uint8_t* end;
    std::uint64_t count;
};

Items items_of(const Value& list) {
    if (list.code == 0x45) return {nullptr, nullptr, 0};
    if (list.code != 0xc0 && list.code != 0xd0) throw ProtocolError("list expected");
    const std::size_t width = list.code == 0xc0 ? 1 : 4;
    need(list.data, list.data + list.size, width);
    return {list.data + width, list.data + list.size, load_big_endian(list.data, width)};
}

}  // namespace

void read_performative(const std::uint8_t* body, const std::uint8_t* end, Performative& out) {
    const Value list = read_value(body, end);
    if (!list.is_described) throw ProtocolError("performative expected");
    out.code = list.descriptor;
    out.payload = body;
    out.payload_size = static_cast<std::size_t>(end - body);
    Items items = items_of(list);
    std::size_t index = 0;
    for (; index < out.fields.size() && index < items.count; ++index)
        out.fields[index] = read_value(items.at, items.end);
    for (; index < out.fields.size(); ++index) out.fields[index] = Value{};
}

std::vector<Value> read_list(const Value& list, std::size_t limit) {
    std::vector<Value> values;
    Items items = items_of(list);
    while (values.size() < limit && values.size() < items.count)
        values.push_back(read_value(items.at, items.end));
    return values;
}

const std::uint8_t* find_data_section(const std::uint8_t* at, const std::uint8_t* end,
                                      std::size_t wanted_bytes) {
    while (end - at > 3 && at[0] == 0x00 && at[1] == 0x53) {
        if (at[2] == kDataSection) {
            const std::size_t head = at[3] == 0xa0 ? 5 : 8;
            const bool fits = static_cast<std::size_t>(end - at) >= head + wanted_bytes;
            return fits ? at + head : nullptr;
        }
        read_value(at, end);
    }
    return nullptr;
}

std::string describe_error(const Value& error) {
    if (error.is_null()) return "no reason given";
    std::string text;
    for (const Value& field : read_list(error, 2)) {
        if (field.size == 0) continue;
        if (!text.empty()) text += ": ";
        text += field.text();
    }
    return text;
}

}  // namespace wire
