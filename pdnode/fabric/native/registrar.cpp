#include "registrar.hpp"

#include <utility>

namespace pdnode {

void Registrar::start() { thread_ = std::thread([this] { run(); }); }

void Registrar::post(Job job) {
  const std::lock_guard<std::mutex> lock(mutex_);
  jobs_.push_back(std::move(job));
  wake_.notify_one();
}

void Registrar::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  jobs_.clear();
}

void Registrar::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;  // what it holds is closed before the next one, and without the lock
    lock.lock();
  }
}

}  // namespace pdnode
