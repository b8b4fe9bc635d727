// Which accesses to shared memory no barrier orders: vector clocks over the threads of a block (as in FastTrack,
// Flanagan and Freund 2009), with the last write, and the first and the last thread that read since, of every word, and
// of every byte of a word that was ever accessed in parts.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace emulate {

using Clock = std::vector<uint32_t>;      // for each thread, the latest moment of it that is known to be past

struct Access {
  uint32_t moment = 0;
  uint32_t place = 0;                     // in the code, from the begin of the image
  uint16_t thread = 0;
};

class Races {
 public:
  // A new block: nothing of the last one counts.
  void start(size_t bytes, uint32_t threads) {
    const size_t words = (bytes + 3) / 4;
    threads_ = threads;
    words_.resize(words);
    bytes_.resize(4 * words);
    in_parts_.assign(words, false);
    own_.resize(threads);
    seen_.resize(size_t(threads) * threads);
    order_all();
  }
  // What any thread did so far is past for all.
  void order_all() { fence_ = ++now_; }
  // What the thread did, and what is past for it, is past for those who take the clock.
  void give(uint32_t thread, Clock& clock) {
    clock.resize(threads_);
    const uint32_t* seen = &seen_[size_t(thread) * threads_];
    for (uint32_t other = 0; other < threads_; ++other) clock[other] = std::max(clock[other], seen[other]);
    clock[thread] = moment_of(thread);
    own_[thread] = ++now_;
  }
  void take(uint32_t thread, const Clock& clock) {
    if (clock.empty()) return;
    uint32_t* seen = &seen_[size_t(thread) * threads_];
    for (uint32_t other = 0; other < threads_; ++other) seen[other] = std::max(seen[other], clock[other]);
  }
  // Enters an access, or returns the earlier one that it races with.
  const Access* enter(uint32_t thread, size_t offset, size_t size, bool writes, uint32_t place) {
    const Access access{moment_of(thread), place, uint16_t(thread)};
    const bool whole = offset % 4 == 0 && size % 4 == 0;
    for (const size_t end = offset + size; offset < end;) {
      const size_t word = offset / 4;
      if (!whole && !in_parts_[word]) {
        in_parts_[word] = true;
        std::fill_n(&bytes_[4 * word], 4, words_[word]);
      }
      Cell* cell = in_parts_[word] ? &bytes_[offset] : &words_[word];
      if (const Access* other = enter(*cell, access, writes)) return other;
      offset += in_parts_[word] ? 1 : 4;
    }
    return nullptr;
  }

 private:
  struct Cell { Access write, first, last; };

  const Access* enter(Cell& cell, const Access& access, bool writes) {
    if (unordered(cell.write, access.thread)) return &cell.write;
    if (!writes) {
      const bool begins = cell.first.moment < fence_ || cell.first.thread == access.thread;
      (begins ? cell.first : cell.last) = access;
      return nullptr;
    }
    if (unordered(cell.first, access.thread)) return &cell.first;
    if (unordered(cell.last, access.thread)) return &cell.last;
    cell = {access, {}, {}};
    return nullptr;
  }
  uint32_t moment_of(uint32_t thread) const { return std::max(own_[thread], fence_); }
  bool unordered(const Access& access, uint32_t thread) const {
    return access.moment >= fence_ && access.thread != thread &&
           access.moment > seen_[size_t(thread) * threads_ + access.thread];
  }

  uint32_t threads_ = 0, now_ = 0, fence_ = 0;
  Clock own_, seen_;
  std::vector<Cell> words_, bytes_;
  std::vector<uint8_t> in_parts_;
};

}  // namespace emulate
