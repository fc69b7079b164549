"""Loggers for aiohttp's servers that stay quiet about what strangers send."""

import logging

from aiohttp.http_exceptions import HttpProcessingError


def http_logger(name: str) -> logging.Logger:
    """For one listener. Malformed HTTP and clients that hang up make aiohttp log an error with a
    trace for each: those are left out, all else passes.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_is_not_noise)
    return logger


def _is_not_noise(record: logging.LogRecord) -> bool:
    noise = (HttpProcessingError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], noise))
