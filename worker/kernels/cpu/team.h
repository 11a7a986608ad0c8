// A fixed team of threads that split loops among themselves. The caller is one of them. Between loops the others spin for a
// moment, as the next loop of a step follows within microseconds, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace upbeat {

class Team {
  public:
    explicit Team(int threads) : count_(threads) {
        for (int i = 1; i < threads; i++) members_.emplace_back([this] { follow(); });
    }

    ~Team() {
        {
            std::lock_guard<std::mutex> hold(mutex_);
            ending_ = true;
            round_.fetch_add(1);
        }
        wake_.notify_all();
        for (auto& m : members_) m.join();
    }

    int count() const { return count_; }

    // work(i) for every i in [0, items), in any order, by all members; returns when all are done. One caller at a time.
    template <typename Work>
    void split(int items, const Work& work) {
        if (count_ == 1 || items <= 1) {
            for (int i = 0; i < items; i++) work(i);
            return;
        }
        std::function<void(int)> call = [&work](int i) { work(i); };
        work_ = &call;
        items_ = items;
        next_.store(0, std::memory_order_relaxed);
        busy_.store(count_ - 1, std::memory_order_relaxed);
        {
            std::lock_guard<std::mutex> hold(mutex_);
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        take();
        for (int spins = 0; busy_.load(std::memory_order_acquire); spins++) {
            if (spins > SPINS) std::this_thread::yield();
        }
    }

  private:
    static constexpr int SPINS = 20000;

    void take() {
        for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) (*work_)(i);
    }

    void follow() {
        unsigned seen = 0;
        for (;;) {
            int spins = 0;
            while (round_.load(std::memory_order_acquire) == seen && spins < SPINS) spins++;
            if (round_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> hold(mutex_);
                wake_.wait(hold, [&] { return round_.load(std::memory_order_acquire) != seen; });
            }
            seen = round_.load(std::memory_order_acquire);
            if (ending_) return;
            take();
            busy_.fetch_sub(1, std::memory_order_release);
        }
    }

    const int count_;
    std::vector<std::thread> members_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<unsigned> round_{0};
    std::atomic<int> next_{0}, busy_{0};
    int items_ = 0;
    const std::function<void(int)>* work_ = nullptr;
    bool ending_ = false;
};

}  // namespace upbeat
