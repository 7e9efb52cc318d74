#include "receiving.hpp"

#include <cstring>

void Receiving::note_first_frame(const wire::Performative& transfer, std::uint64_t now) {
    const std::uint8_t* end = transfer.payload + transfer.payload_size;
    const std::uint8_t* body = wire::find_data_section(transfer.payload, end, sizeof(Stamp));
    Stamp stamp{};
    if (body != nullptr) std::memcpy(&stamp, body, sizeof stamp);
    if (stamp.run_id != run_id_)
        ++tally_.strays;
    else
        latency_.add(now > stamp.due_ns ? now - stamp.due_ns : 0);
}

void Receiving::queue_disposition(std::uint32_t first, std::uint32_t last) {
    // Accepted by the receiver for first..last. The layout never changes, so it is laid out
    // by hand: this is the client's hottest frame beside the transfer.
    std::uint8_t frame[] = {0, 0, 0, 0, 2, 0, 0, 0,                      // frame header
                            0, 0x53, wire::kDisposition, 0xc0, 17, 5,    // list of five
                            0x41, 0x70, 0, 0, 0, 0, 0x70, 0, 0, 0, 0,    // receiver, first, last
                            0x42, 0, 0x53, wire::kAccepted, 0x45};       // settled, state
    wire::store_u32(frame, sizeof frame);
    wire::store_u32(frame + 16, first);
    wire::store_u32(frame + 21, last);
    if (!options_.confirms_settlement) frame[25] = 0x41;
    if (options_.rejects) frame[28] = wire::kRejected;
    connection().queue(frame, sizeof frame);
}

void Receiving::count_completed(std::uint64_t number, std::uint64_t now) {
    tally_.completed += number;
    if (is_done() && end_ns_ == 0) end_ns_ = now;
}
