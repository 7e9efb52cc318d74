#include "sender.hpp"

#include <algorithm>

namespace {

// More is not queued at a time, so that settlements are read in between.
constexpr std::size_t kQueuedBytes = 256 * 1024;

std::size_t power_of_two_from(std::uint64_t least) {
    std::size_t size = 1;
    while (size < least) size *= 2;
    return size;
}

}  // namespace

Sender::Sender(const Options& options, LinkSpec link, std::uint64_t quota, double rate,
               std::uint64_t run_id, std::uint64_t first_number)
    : options_(options),
      connection_(options, std::move(link), *this),
      quota_(quota),
      rate_(rate),
      run_id_(run_id),
      first_number_(first_number),
      in_flight_(power_of_two_from(options.window), 0) {}

void Sender::on_attached() {
    const std::uint32_t frame_bytes =
        std::min(options_.max_frame_bytes, connection_.peer_max_frame_bytes());
    message_ = std::make_unique<EncodedMessage>(options_, frame_bytes);
}

bool Sender::pump(std::uint64_t now) {
    if (!connection_.is_ready()) return false;
    const auto& frames = message_->frames();
    while (connection_.queued_bytes() < kQueuedBytes) {
        if (frame_ == 0) {
            if (!may_start(now)) return false;
            const std::uint64_t due = due_ns(tally_.sent, now);
            const auto id = static_cast<std::uint32_t>(tally_.sent);
            message_->patch(id, Stamp{run_id_, due}, first_number_ + tally_.sent);
            in_flight_[id & (in_flight_.size() - 1)] = due;
            ++tally_.sent;
        }
        if (connection_.session_window() == 0) return false;
        connection_.queue(message_->data() + frames[frame_].offset, frames[frame_].size);
        frame_ = frame_ + 1 == frames.size() ? 0 : frame_ + 1;
        connection_.count_transfer_sent(frame_ == 0);
    }
    return true;
}

bool Sender::may_start(std::uint64_t now) const {
    if (tally_.sent >= quota_ || tally_.sent - settled() >= options_.window) return false;
    // Settlements may come out of order: the slot of an older delivery must not be taken.
    if (in_flight_[tally_.sent & (in_flight_.size() - 1)] != 0) return false;
    if (connection_.credit() == 0) return false;
    return rate_ == 0 || due_ns(tally_.sent, now) <= now;
}

std::uint64_t Sender::due_ns(std::uint64_t index, std::uint64_t now) const {
    if (rate_ == 0) return now;
    return start_ns_ + static_cast<std::uint64_t>(static_cast<double>(index) / rate_ * 1e9);
}

std::uint64_t Sender::next_due_ns() const {
    if (rate_ == 0 || tally_.sent >= quota_) return 0;
    return due_ns(tally_.sent, 0);
}

void Sender::on_disposition(const wire::Performative& disposition, std::uint64_t now) {
    const bool is_from_receiver = disposition.fields[0].number == 1;
    const bool is_settled = disposition.fields[3].number == 1;
    const std::uint64_t state = disposition.fields[4].descriptor;
    const bool is_outcome = state >= wire::kAccepted && state <= wire::kModified;
    if (!is_from_receiver || (!is_settled && !is_outcome)) return;
    const std::uint32_t first = disposition.u32(1);
    std::uint32_t last = disposition.fields[2].is_null() ? first : disposition.u32(2);
    const auto next = static_cast<std::uint32_t>(tally_.sent);
    if (static_cast<std::int32_t>(last - next) >= 0) last = next - 1;
    for (std::uint32_t id = first; static_cast<std::int32_t>(last - id) >= 0; ++id)
        settle(id, state, now);
    if (state == wire::kRejected && refusal_.empty()) {
        const auto fields = wire::read_list(disposition.fields[4], 1);
        if (!fields.empty()) refusal_ = wire::describe_error(fields[0]);
    }
}

void Sender::settle(std::uint32_t delivery_id, std::uint64_t outcome, std::uint64_t now) {
    std::uint64_t& sent_ns = in_flight_[delivery_id & (in_flight_.size() - 1)];
    if (sent_ns == 0) return;
    switch (outcome) {
        case wire::kAccepted: ++tally_.accepted; break;
        case wire::kRejected: ++tally_.rejected; break;
        default: ++tally_.released; break;
    }
    latency_.add(now > sent_ns ? now - sent_ns : 0);
    sent_ns = 0;
    if (is_done()) end_ns_ = now;
}
