#include "sender.hpp"

#include <algorithm>

Sender::Sender(const Options& options, LinkSet& links, LinkSpec spec, std::uint64_t quota,
               double rate, std::uint64_t run_id, std::uint64_t first_number)
    : options_(options),
      link_(links.add(std::move(spec), *this)),
      connection_(links.connection()),
      quota_(quota),
      rate_(rate),
      run_id_(run_id),
      first_number_(first_number) {}

void Sender::on_attached() {
    const std::uint32_t frame_bytes =
        std::min(options_.max_frame_bytes, connection_.peer_max_frame_bytes());
    message_ = std::make_unique<EncodedMessage>(options_, link_.handle(), frame_bytes);
}

void Sender::pump(std::uint64_t now) {
    if (!connection_.is_ready() || !link_.is_attached()) return;
    const auto& frames = message_->frames();
    while (!connection_.is_full() && connection_.session_window() != 0) {
        if (frame_ == 0) {
            if (!may_start(now)) return;
            const std::uint64_t due = due_ns(tally_.sent, now);
            message_->patch(link_.start_delivery(due), Stamp{run_id_, due},
                            first_number_ + tally_.sent);
            ++tally_.sent;
        }
        connection_.queue(message_->data() + frames[frame_].offset, frames[frame_].size);
        connection_.count_transfer_sent();
        frame_ = frame_ + 1 == frames.size() ? 0 : frame_ + 1;
    }
}

bool Sender::may_start(std::uint64_t now) const {
    if (tally_.sent >= quota_ || tally_.sent - settled() >= options_.window) return false;
    if (link_.credit() == 0) return false;
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

void Sender::on_settled(const wire::Performative& disposition, std::uint64_t due,
                        std::uint64_t now) {
    switch (disposition.fields[4].descriptor) {
        case wire::kAccepted: ++tally_.accepted; break;
        case wire::kRejected: ++tally_.rejected; break;
        default: ++tally_.released; break;
    }
    latency_.add(now > due ? now - due : 0);
    if (is_done()) end_ns_ = now;
    if (tally_.rejected != 0 && refusal_.empty()) {
        const auto fields = wire::read_list(disposition.fields[4], 1);
        if (!fields.empty()) refusal_ = wire::describe_error(fields[0]);
    }
}
