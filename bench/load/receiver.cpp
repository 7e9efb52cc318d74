#include "receiver.hpp"

#include <algorithm>

void Receiver::pump() {
    if (!connection().is_ready() || !is_attached()) return;
    if (range_size_ != 0) send_disposition();
    // Credit follows completions as an SDK's prefetch does, and never exceeds the quota: what
    // is delivered beyond it would stay locked and spoil the next run.
    const std::uint64_t allowed = std::min(quota_, tally_.completed + options_.credit);
    const std::uint64_t more = allowed > granted_ ? allowed - granted_ : 0;
    if (more == 0 || (more < (options_.credit + 1) / 2 && allowed != quota_)) return;
    granted_ = allowed;
    link_.grant(tally_.received, granted_ - tally_.received);
}

void Receiver::on_transfer(const wire::Performative& transfer, std::uint64_t now) {
    last_now_ns_ = now;
    if (!is_in_delivery_) {
        delivery_id_ = transfer.u32(1);
        is_presettled_ = transfer.fields[4].number == 1;
        note_first_frame(transfer, now);
    }
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

void Receiver::complete_later(std::uint32_t delivery_id) {
    if (range_size_ != 0 && delivery_id != range_first_ + range_size_) send_disposition();
    if (range_size_ == 0) range_first_ = delivery_id;
    if (++range_size_ >= options_.settle_range) send_disposition();
}

void Receiver::send_disposition() {
    queue_disposition(range_first_, range_first_ + range_size_ - 1);
    if (!options_.confirms_settlement) count_completed(range_size_, last_now_ns_);
    range_size_ = 0;
}

void Receiver::on_settled(const wire::Performative&, std::uint64_t, std::uint64_t now) {
    count_completed(1, now);
}
