"""TCP: the default transport. Needs nothing beyond the standard library."""

from prfaas.transport.tcp.channel import TcpChannel
from prfaas.transport.tcp.config import TcpConfig
from prfaas.transport.tcp.listener import TcpListener
from prfaas.transport.tcp.transport import TcpTransport

__all__ = ["TcpChannel", "TcpConfig", "TcpListener", "TcpTransport"]
