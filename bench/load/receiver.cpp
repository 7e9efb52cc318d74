#include "receiver.hpp"

#include <algorithm>
#include <cstring>

Receiver::Receiver(const Options& options, LinkSpec link, std::uint64_t quota,
                   std::uint64_t run_id)
    : options_(options),
      connection_(options, std::move(link), *this),
      quota_(quota),
      run_id_(run_id) {}

void Receiver::pump() {
    if (!connection_.is_ready()) return;
    if (range_size_ != 0) send_disposition();
    // Credit follows completions as an SDK's prefetch does, and never exceeds the quota: what
    // is delivered beyond it would stay locked and spoil the next run.
    const std::uint64_t allowed = std::min(quota_, tally_.completed + options_.credit);
    const std::uint64_t more = allowed > granted_ ? allowed - granted_ : 0;
    if (more == 0 || (more < (options_.credit + 1) / 2 && allowed != quota_)) return;
    granted_ = allowed;
    connection_.grant(static_cast<std::uint32_t>(tally_.received),
                      static_cast<std::uint32_t>(granted_ - tally_.received));
}

void Receiver::on_transfer(const wire::Performative& transfer, std::uint64_t now) {
    last_now_ns_ = now;
    if (!is_in_delivery_) note_first_frame(transfer, now);
    tally_.body_bytes += transfer.payload_size;
    is_in_delivery_ = transfer.fields[5].number == 1;
    const bool is_aborted = transfer.fields[9].number == 1;
    if (is_aborted) {
        is_in_delivery_ = false;
        return;
    }
    if (is_in_delivery_) return;
    ++tally_.received;
    if (is_presettled_)
        count_completed(1, now);
    else
        complete_later(delivery_id_);
}

void Receiver::note_first_frame(const wire::Performative& transfer, std::uint64_t now) {
    if (first_ns_ == 0) first_ns_ = now;
    delivery_id_ = transfer.u32(1);
    is_presettled_ = transfer.fields[4].number == 1;
    const std::uint8_t* end = transfer.payload + transfer.payload_size;
    const std::uint8_t* body = wire::find_data_section(transfer.payload, end, sizeof(Stamp));
    Stamp stamp{};
    if (body != nullptr) std::memcpy(&stamp, body, sizeof stamp);
    if (stamp.run_id != run_id_)
        ++tally_.strays;
    else
        latency_.add(now > stamp.due_ns ? now - stamp.due_ns : 0);
}

void Receiver::complete_later(std::uint32_t delivery_id) {
    if (range_size_ != 0 && delivery_id != range_first_ + range_size_) send_disposition();
    if (range_size_ == 0) range_first_ = delivery_id;
    if (++range_size_ >= options_.settle_range) send_disposition();
}

void Receiver::send_disposition() {
    // Accepted by the receiver for first..last. The layout never changes, so it is laid out
    // by hand: this is the client's hottest frame beside the transfer.
    std::uint8_t frame[] = {0, 0, 0, 0, 2, 0, 0, 0,                      // frame header
                            0, 0x53, wire::kDisposition, 0xc0, 17, 5,    // list of five
                            0x41, 0x70, 0, 0, 0, 0, 0x70, 0, 0, 0, 0,    // receiver, first, last
                            0x42, 0, 0x53, wire::kAccepted, 0x45};       // settled, state
    wire::store_u32(frame, sizeof frame);
    wire::store_u32(frame + 16, range_first_);
    wire::store_u32(frame + 21, range_first_ + range_size_ - 1);
    if (!options_.confirms_settlement) frame[25] = 0x41;
    if (options_.rejects) frame[28] = wire::kRejected;
    connection_.queue(frame, sizeof frame);
    if (!options_.confirms_settlement) count_completed(range_size_, last_now_ns_);
    range_size_ = 0;
}

void Receiver::on_disposition(const wire::Performative& disposition, std::uint64_t now) {
    const bool is_from_sender = disposition.fields[0].number == 0;
    const bool is_settled = disposition.fields[3].number == 1;
    if (!is_from_sender || !is_settled || !options_.confirms_settlement) return;
    const std::uint32_t first = disposition.u32(1);
    const std::uint32_t last = disposition.fields[2].is_null() ? first : disposition.u32(2);
    count_completed(std::uint64_t{last - first} + 1, now);
}

void Receiver::count_completed(std::uint64_t number, std::uint64_t now) {
    tally_.completed += number;
    if (is_done() && end_ns_ == 0) end_ns_ = now;
}
